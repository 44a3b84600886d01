"""Fleet's names over Trireme: for scripts that were written for Paddle's parameter server.

from trireme import fleet

fleet.init(fleet.PaddleCloudRoleMaker())
...                                     # the model
optimizer = fleet.distributed_optimizer(dense_optimizer, strategy, model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    ...                                 # the loop; optimizer.step() is the push
    fleet.stop_worker()
"""

from trireme.fleet import metrics, util
from trireme.fleet.job import Job as _Job
from trireme.fleet.layers import CountFilterEntry, ParamAttr, ProbabilityEntry, ShowClickEntry
from trireme.fleet.roles import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
from trireme.fleet.strategy import DistributedStrategy
from trireme.metrics import CTRMetricBundle as _CTRMetricBundle
from trireme.ps.adam_d2sum import AdamD2Sum

# The one job of this process, as Fleet has it; its cluster is Trireme's default one.
_job = _Job()

init = _job.init
is_server = _job.is_server
is_worker = _job.is_worker
is_first_worker = _job.is_first_worker
worker_index = _job.worker_index
worker_num = _job.worker_num
server_num = _job.server_num
init_server = _job.init_server
run_server = _job.run_server
init_worker = _job.init_worker
barrier_worker = _job.barrier_worker
stop_worker = _job.stop_worker
distributed_optimizer = _job.distributed_optimizer
save_persistables = _job.save_persistables
load_model = _job.load_model
sparse_embedding = _job.tables.sparse_embedding
ctr_metric_bundle = _CTRMetricBundle

__all__ = [
    "AdamD2Sum",
    "CountFilterEntry",
    "DistributedStrategy",
    "PaddleCloudRoleMaker",
    "ParamAttr",
    "ProbabilityEntry",
    "Role",
    "ShowClickEntry",
    "UserDefinedRoleMaker",
    "barrier_worker",
    "ctr_metric_bundle",
    "distributed_optimizer",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_model",
    "metrics",
    "run_server",
    "save_persistables",
    "server_num",
    "sparse_embedding",
    "stop_worker",
    "util",
    "worker_index",
    "worker_num",
]
