"""The network, and its training on a site. Any torch module will do."""

from collections import OrderedDict
from math import prod

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def network(spec):
    """Return the network for samples of shape spec.shape with spec.classes classes.

    The last layer must be called head, because methods look for it by this name.
    """
    body = nn.Linear(prod(spec.shape), 32)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), body=body, act=nn.ReLU(), head=nn.Linear(32, spec.classes)))


def train(model, data, context):
    """Train on one site in one round, and return the last loss. Without this function, Attune uses SGD on cross-entropy."""
    settings = context.settings
    optimizer = torch.optim.AdamW(context.parameters(), lr=settings.lr)
    for epoch in range(settings.local_epochs):
        for x, y in data.batches(settings.batch_size):
            loss = cross_entropy(model(x), y, label_smoothing=0.05) + context.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        context.progress((epoch + 1) / settings.local_epochs)
    return float(loss.detach())
