"""The interface between a mount and the session that serves its requests."""

from abc import ABC, abstractmethod


class Session(ABC):
    """Serves one mount; `name` tells which kind it is."""

    name: str

    @abstractmethod
    async def run(self) -> None:
        """Serve until the filesystem is unmounted or stop() is called."""

    @abstractmethod
    def stop(self) -> None:
        """End run()."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources."""
