"""A journal never loses an acknowledged record without a word, and never refuses what a crash left."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irdmafs.backend.kv.journal import Damage, Journal, survey

# One with zeros, one that is longer than a sector, one that looks like records.
PAYLOADS = [b"first", bytes(40), b"x" * 700, b"\xa7\x01\x00\x00\x00" * 8, b"last one"]


def journal_of(path: Path, payloads: list[bytes], power_safe: bool) -> bytes:
    journal = Journal(str(path), power_safe=power_safe)
    for payload in payloads:
        journal.append(payload)
    journal.close()
    return path.read_bytes()


def loaded(path: Path, data: bytes, power_safe: bool) -> list[bytes]:
    path.write_bytes(data)
    journal = Journal(str(path), power_safe=power_safe)
    try:
        return journal.load()
    finally:
        journal.close()


@pytest.mark.parametrize("power_safe", [False, True])
def test_no_changed_bit_loses_a_record_without_a_word(tmp_path: Path, power_safe: bool) -> None:
    data = journal_of(tmp_path / "journal", PAYLOADS, power_safe)
    for place in range(len(data)):
        for change in (0x01, 0x40, 0xFF, data[place]):
            damaged = bytearray(data)
            damaged[place] ^= change
            if damaged == data:
                continue
            found = survey(bytes(damaged), power_safe=power_safe)
            if found.payloads != PAYLOADS:
                (broken,) = found.broken
                assert broken.start <= place < broken.end
                assert len(found.payloads) == len(PAYLOADS) - 1


def test_a_damaged_journal_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    data = bytearray(journal_of(tmp_path / "journal", PAYLOADS, False))
    data[30] ^= 1
    with pytest.raises(Damage, match="journal is damaged from byte 15 to 65") as caught:
        loaded(tmp_path / "journal", bytes(data), False)
    assert "1 records before it and 3 behind it are sound" in str(caught.value)
    assert (tmp_path / "journal").read_bytes() == data


@pytest.mark.parametrize("power_safe", [False, True])
def test_a_record_cut_short_anywhere_is_dropped_and_those_before_it_are_kept(
    tmp_path: Path, power_safe: bool
) -> None:
    ends = [
        len(journal_of(tmp_path / f"{count}", PAYLOADS[:count], power_safe))
        for count in range(len(PAYLOADS) + 1)
    ]
    data = (tmp_path / f"{len(PAYLOADS)}").read_bytes()
    for length in range(len(data) + 1):
        whole = sum(end <= length for end in ends) - 1
        assert loaded(tmp_path / "cut", data[:length], power_safe) == PAYLOADS[:whole], length


@settings(deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=1500), max_size=5),
    st.binary(min_size=1, max_size=4000),
    st.data(),
)
def test_a_record_of_which_a_power_loss_left_sectors_out_is_dropped(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[bytes],
    last: bytes,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("power") / "journal"
    start = len(journal_of(path, before, True))
    os.unlink(path)
    torn = bytearray(journal_of(path, [*before, last], True))
    sectors = range(start // 512, -(-len(torn) // 512))
    lost = data.draw(st.sets(st.sampled_from(sectors), min_size=1))
    for sector in lost:
        for place in range(max(sector * 512, start), min((sector + 1) * 512, len(torn))):
            torn[place] = 0
    assert loaded(path, bytes(torn), True) == before
    assert path.stat().st_size == start


@settings(deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=6, unique=True), st.data()
)
def test_whatever_is_changed_every_record_that_is_sound_is_found(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / "journal"
    written = bytearray(journal_of(path, payloads, False))
    ends: list[int] = []
    for payload in payloads:
        ends.append((ends[-1] if ends else 0) + len(payload) + 10)
    places = data.draw(st.sets(st.integers(0, len(written) - 1), min_size=1, max_size=3))
    for place in places:
        written[place] ^= data.draw(st.integers(1, 255))
    touched = {next(i for i, end in enumerate(ends) if place < end) for place in places}
    found = survey(bytes(written), power_safe=False)
    kept = [payload for number, payload in enumerate(payloads) if number not in touched]
    # The last byte of a record says nothing: one that lost it is found all the same.
    assert [payload for payload in found.payloads if payload in kept] == kept
