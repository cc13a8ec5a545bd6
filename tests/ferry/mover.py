"""The mover itself."""

from pathlib import Path

from irdmafs.backend.transport.link import Link
from irdmafs.backend.transport.mover import Host, Mover, Serving

from .messages import MESSAGES
from .serving import FerryServing
from .way import FerryWay


class Ferry(Mover):
    """By files in `pier`, a directory that both ends see."""

    name = FerryWay.name
    messages = MESSAGES

    def __init__(self, pier: Path) -> None:
        self._pier = pier

    @property
    def is_usable(self) -> bool:
        return self._pier.is_dir()

    def way(self, link: Link) -> FerryWay:
        return FerryWay(link, self._pier)

    async def serving(self, host: Host) -> Serving:
        return FerryServing(host, self._pier)

    async def run(self) -> None:
        """Nothing has to be done meanwhile."""
