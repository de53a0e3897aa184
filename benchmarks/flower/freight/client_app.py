"""Flower's device. It hands back what it was given with one tensor changed, so that everything travels."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"].to_numpy_ndarrays()
    arrays[0] = arrays[0] + 1
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 3})}
    return Message(content=RecordDict(content), reply_to=message)
