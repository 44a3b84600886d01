"""Forward and backward of a worker's batches on other processes, the compute workers.

    worker: read, plan, pull -- request: weights, batch, rows --> compute worker: forward, backward
    worker: clip, push, metrics <-- answer: outputs, loss, gradients, buffers --

A compute worker is a pure function of a request: it keeps nothing that a later request needs. So
any of them may compute any batch, and one that is killed takes nothing along.

A worker's side:
remote_model      a model that compute workers run
remote_stages     a model in stages, some of which compute workers run; which of both a Trainer has
stage_call        the stages of one request: forward, then backward
compute_workers   the compute workers of a label: credits, failures, deadlines

A compute worker's side:
service           it runs its script's model for workers
model_runner      one request for a whole model
stage_runner      one request for stages
kept_graphs       the graphs of stages between forward and backward
job_end           how it learns that the job is over

Both:
compute_messages  what is asked and answered
stage_messages    the same for stages
tensors           tensors as the arrays of a message
model_state       weights, buffers and gradients of a model, what makes two models one, and whether
                  an answer fits a model
"""
