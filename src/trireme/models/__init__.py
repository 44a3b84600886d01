"""Reference models: plain torch modules, one readable file each. docs/models.md has results."""

from trireme.models.ctr_dnn import CtrDnn
from trireme.models.dcn_v2 import DCNv2
from trireme.models.deepfm import DeepFM
from trireme.models.din import DIN
from trireme.models.dlrm import DLRM
from trireme.models.esmm import ESMM
from trireme.models.fm import FM
from trireme.models.inputs import CRITEO_FEATURES
from trireme.models.lr import LR
from trireme.models.slot_dnn import SlotDnn
from trireme.models.two_tower import Tower, TwoTower
from trireme.models.wide_deep import WideDeep
from trireme.models.word2vec import SkipGram

__all__ = [
    "CRITEO_FEATURES",
    "CtrDnn",
    "DCNv2",
    "DIN",
    "DLRM",
    "DeepFM",
    "ESMM",
    "FM",
    "LR",
    "SkipGram",
    "SlotDnn",
    "Tower",
    "TwoTower",
    "WideDeep",
]
