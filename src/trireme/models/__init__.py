"""Reference models: plain torch modules, one readable file each."""

from trireme.models.ctr_dnn import CRITEO_FEATURES, CtrDnn
from trireme.models.wide_deep import WideDeep

__all__ = ["CRITEO_FEATURES", "CtrDnn", "WideDeep"]
