"""The settings of a cluster, which a mount or a node needs before anything else."""

import msgspec

from ..etcd.engine import EtcdEngine
from ..model.records import SETTINGS_KEY, Settings, decode
from ..model.values import ConfigError
from .config import ClusterConfig

__all__ = ["read_settings"]


async def read_settings(engine: EtcdEngine, config: ClusterConfig) -> Settings:
    """Return the settings. Raises ConfigError if there is no such cluster, OSError if etcd cannot be
    read."""
    found = await engine.get(SETTINGS_KEY)
    if found is None:
        raise ConfigError(
            f"etcd at {', '.join(config.cluster.etcd)} knows no cluster named "
            f"{config.cluster.name!r}; make it with: irdmafs cluster init"
        )
    try:
        return decode(found.value, Settings)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the settings of cluster {config.cluster.name!r} in etcd are damaged, or of another "
            f"version of irdmafs: {error}"
        ) from error
