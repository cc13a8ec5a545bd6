"""What a mount needs of whatever carries its requests."""

from abc import ABC, abstractmethod
from collections.abc import Mapping


class Session(ABC):
    """Serves one mount; `name` tells which kind it is."""

    name: str

    @property
    @abstractmethod
    def requests(self) -> Mapping[str, int]:
        """Requests so far, by kind."""

    @property
    @abstractmethod
    def errors(self) -> Mapping[str, int]:
        """Requests that were answered with an error, by its name."""

    @abstractmethod
    async def run(self) -> None:
        """Serve until the filesystem is unmounted or stop() is called."""

    @abstractmethod
    def stop(self) -> None:
        """End run()."""

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds."""
