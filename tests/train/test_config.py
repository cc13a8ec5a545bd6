"""A configuration is read as it was written, and an error names the key and what it may be; names of pushes
say what they were made of."""

import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from irdmafs.train.config import TrainConfig
from irdmafs.train.errors import TrainError
from irdmafs.train.plan import Push
from irdmafs.train.pushes import _push_in_file, name_in_file, name_in_shards, push_in_shards
from irdmafs.train.rules import RULES, options_of

PATH = Path("config.toml")
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", fullmatch=True)
numbers = st.floats(0, 3e38) | st.integers(0, 1 << 60)


@st.composite
def configurations(draw: st.DrawFn) -> TrainConfig:
    rule = draw(st.sampled_from(list(RULES)))
    options = {
        name: draw(st.booleans() if isinstance(default, bool) else st.floats(0, 0.999))
        for name, default in options_of(rule).items()
        if draw(st.booleans())
    }
    sync = draw(
        st.sampled_from(["bsp", "async"])
        | st.builds("{}:{}".format, st.sampled_from(["quorum", "local"]), st.integers(1, 999999))
        | st.builds("ssp:{}".format, st.integers(0, 999999))
    )
    workers: Any = draw(
        st.just("auto") | st.integers(1, 10000) | st.lists(names, min_size=1, max_size=5).map(tuple)
    )
    try:
        return TrainConfig(
            rule=rule,
            lr=draw(st.none() | numbers),
            options=options,
            sync=sync,
            workers=workers,
            clip_norm=draw(numbers),
            nonfinite=draw(st.sampled_from(["refuse", "skip", "count"])),
            staleness=draw(st.sampled_from(["none", "inverse"])),
            keep=draw(st.integers(2, 1 << 40)),
            whole_every=draw(st.integers(0, 1 << 40)),
        )
    except TrainError as error:
        # Options that do not go together.
        assume(not any(words in str(error) for words in ("nesterov needs", "no learning rate")))
        raise


@given(configurations())
def test_configuration_is_read_as_it_was_written(config: TrainConfig) -> None:
    assert TrainConfig.read(PATH, config.toml().encode()) == config


VALUES: list[Any] = [
    "", "bsp", "quorum:0", "quorum", "ssp:-1", "local:0", "x" * 100, 0, 1, -1, 10**400, 0.5, -0.5,
    float("nan"), float("inf"), True, False, (), ("a",), ("a", 1), ("a/b",), ((),),
]  # fmt: skip
KEYS = [one.name for one in fields(TrainConfig)]


def test_bad_value_is_an_error_that_names_the_key() -> None:
    for key, value in itertools.product(KEYS, VALUES):
        try:
            config = TrainConfig(**{key: value})
        except TrainError as error:
            assert key in str(error)
            number = {"NaN": "nan", "Infinity": "inf"}.get(json.dumps(value), json.dumps(value))
            text = f"{key} = {number}\n"
            with pytest.raises(TrainError, match=key) as caught:
                TrainConfig.read(PATH, text.encode())
            assert str(caught.value).startswith("config.toml: ")
        else:
            assert TrainConfig.read(PATH, config.toml().encode()) == config


@pytest.mark.parametrize("option", ["momentum", "dampening", "weight_decay", "nesterov", "other"])
def test_bad_option_is_an_error_that_names_it(option: str) -> None:
    values: list[Any] = [-1e39, float("nan"), float("inf"), "text", (1,), True]
    for value in values:
        with pytest.raises(TrainError, match=option):
            TrainConfig(rule="sgd", options={option: value})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"learning_rate = 1\n", "unknown keys: learning_rate; keys are rule, lr"),
        (b"\xff", "utf-8"),
        (b"rule = ", "Invalid value"),
        (b"rule = 'sgd'\nrule = 'sgd'\n", "Cannot overwrite"),
        (b"lr = 1979-05-27\n", "lr is a number"),
        (b"options = 3\n", "options is a table"),
        (b"[options.momentum]\n", "momentum"),
        (b"a = " + b"[" * 100_000, "config.toml"),
        (b"keep = " + b"9" * 10_000, "config.toml"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_file_that_is_no_configuration_is_an_error_with_its_name(text: bytes, reason: str) -> None:
    with pytest.raises(TrainError, match=reason) as caught:
        TrainConfig.read(PATH, text)
    assert str(caught.value).startswith("config.toml: ")


@given(
    st.builds(
        Push,
        names,
        st.integers(1, 10**18 - 1),
        st.just(""),
        st.floats(0, 3e38),
        st.integers(-1, 10**18),
        st.none() | st.floats(0, 3e38),
    )
)
def test_name_of_a_push_says_what_it_was_made_of(push: Push) -> None:
    name = name_in_shards(push)
    assert push_in_shards(name) == push._replace(path=name)
    assert len(name) <= 255


@given(names, st.integers(1, 10**18 - 1))
def test_name_of_a_push_in_a_file_says_its_worker_and_step(worker: str, step: int) -> None:
    found = _push_in_file(name_in_file(Push(worker, step)), {})
    assert (found.worker, found.step) == (worker, step)


@given(st.text(max_size=40) | st.from_regex(r"[a-z]+@[0-9]+(;[a-z]+=[0-9]+){0,3}", fullmatch=True))
def test_name_that_is_no_push_is_none_or_refused_and_others_say_what_they_say(name: str) -> None:
    try:
        found = push_in_shards(name)
    except OSError:
        return
    if found is not None:
        assert name.startswith(f"{found.worker}@")
        again = name_in_shards(found)
        assert push_in_shards(again) == found._replace(path=again)
