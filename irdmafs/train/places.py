from pathlib import Path


def shard_names(directory: Path, shards: int | None) -> list[str]:
    return [str(number) for number in range(shards or 1)]


def is_here(path: Path) -> bool | None:
    return None
