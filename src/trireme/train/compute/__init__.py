"""Forward and backward of a worker's batches on other processes, the compute workers.

    worker: read, plan, pull -- request: weights, batch, rows --> compute worker: forward, backward
    worker: clip, push, metrics <-- answer: outputs, loss, gradients, buffers --

A compute worker is a pure function of a request: it keeps nothing that a later request needs. So
any of them may compute any batch, and one that is killed takes nothing along.

remote_model      a worker's side: a model that compute workers run
compute_workers   the compute workers of a label: credits, failures, deadlines
service           a compute worker's side: it runs its script's model for workers
model_runner      one request there
job_end           how a compute worker learns that the job is over
compute_messages  what is asked and answered
tensors           tensors as the arrays of a message
model_state       the weights, buffers and gradients of a model, and what makes two models one
"""
