"""Reference models: plain torch modules, one readable file each. docs/models.md has results.

Each is loaded on first use: a job trains one of them.
"""

from typing import TYPE_CHECKING

from trireme.lazy_names import lazy_names

if TYPE_CHECKING:
    from trireme.models.aitm import AITM
    from trireme.models.autofis import AutoFIS
    from trireme.models.autoint import AutoInt
    from trireme.models.bert4rec import BERT4Rec
    from trireme.models.bst import BST
    from trireme.models.ctr_dnn import CtrDnn
    from trireme.models.dcn import DCN
    from trireme.models.dcn_v2 import DCNv2
    from trireme.models.deepfefm import DeepFEFM
    from trireme.models.deepfm import DeepFM
    from trireme.models.deeprec import DeepRec
    from trireme.models.dien import DIEN
    from trireme.models.difm import DIFM
    from trireme.models.din import DIN
    from trireme.models.dlrm import DLRM
    from trireme.models.dmr import DMR
    from trireme.models.dpin import DPIN
    from trireme.models.dselect_k import DSelectK
    from trireme.models.dsin import DSIN
    from trireme.models.dssm import DSSM
    from trireme.models.ensfm import ENSFM
    from trireme.models.escm2 import ESCM2
    from trireme.models.esmm import ESMM
    from trireme.models.fastformer import Fastformer
    from trireme.models.fat_deepffm import FATDeepFFM
    from trireme.models.ffm import FFM
    from trireme.models.fgcnn import FGCNN
    from trireme.models.flen import FLEN
    from trireme.models.fm import FM
    from trireme.models.gatenet import GateNet
    from trireme.models.inputs import CRITEO_FEATURES
    from trireme.models.iprec import IPRec
    from trireme.models.kim import KIM
    from trireme.models.lr import LR
    from trireme.models.maml import MAML
    from trireme.models.match_pyramid import MatchPyramid
    from trireme.models.metaheac import MetaHeac
    from trireme.models.mhcn import MHCN
    from trireme.models.mind import MIND
    from trireme.models.mmoe import MMoE
    from trireme.models.multiview_simnet import MultiviewSimnet
    from trireme.models.naml import NAML
    from trireme.models.ncf import NCF
    from trireme.models.ple import PLE
    from trireme.models.share_bottom import ShareBottom
    from trireme.models.sign import SIGN
    from trireme.models.slot_dnn import SlotDnn
    from trireme.models.tagspace import TagSpace
    from trireme.models.tdm import TDM
    from trireme.models.textcnn import TextCNN
    from trireme.models.tisas import TiSAS
    from trireme.models.two_tower import Tower, TwoTower
    from trireme.models.wide_deep import WideDeep
    from trireme.models.word2vec import SkipGram
    from trireme.models.xdeepfm import XDeepFM

__all__ = [
    "AITM",
    "AutoFIS",
    "AutoInt",
    "BERT4Rec",
    "BST",
    "CRITEO_FEATURES",
    "CtrDnn",
    "DCN",
    "DCNv2",
    "DIEN",
    "DIFM",
    "DIN",
    "DLRM",
    "DMR",
    "DPIN",
    "DSIN",
    "DSSM",
    "DSelectK",
    "DeepFEFM",
    "DeepFM",
    "DeepRec",
    "ENSFM",
    "ESCM2",
    "ESMM",
    "FATDeepFFM",
    "FFM",
    "FGCNN",
    "FLEN",
    "FM",
    "Fastformer",
    "GateNet",
    "IPRec",
    "KIM",
    "LR",
    "MAML",
    "MHCN",
    "MIND",
    "MMoE",
    "MatchPyramid",
    "MetaHeac",
    "MultiviewSimnet",
    "NAML",
    "NCF",
    "PLE",
    "SIGN",
    "ShareBottom",
    "SkipGram",
    "SlotDnn",
    "TDM",
    "TagSpace",
    "TextCNN",
    "TiSAS",
    "Tower",
    "TwoTower",
    "WideDeep",
    "XDeepFM",
]

__getattr__, __dir__ = lazy_names(__name__)
