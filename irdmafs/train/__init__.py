"""Training in a directory: workers push gradients and pull parameters, as files (docs/training.md).

>>> from irdmafs import train
>>> with train.Worker("/mnt/params/run1", "worker0") as worker:
...     parameters = worker.pull()                        # read-only arrays by name, of one version
...     for batch in batches:
...         gradients = ...                               # arrays or tensors by name
...         worker.push(gradients, weight=len(batch))     # counts once when this returns
...         parameters = worker.pull()                    # the next version

``irdmafs train init DIR`` begins to train in a directory. Somebody has to run ``irdmafs train reduce DIR``,
the reducer; ``irdmafs train run DIR --workers N -- COMMAND`` runs reducers and workers of a host.
"""

from .config import TrainConfig
from .errors import Refused, TrainError
from .models import begin, end
from .reducer import Reducer
from .worker import Worker

__all__ = ["Reducer", "Refused", "TrainConfig", "TrainError", "Worker", "begin", "end"]
