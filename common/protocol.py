"""Constants of the protocol that the .proto files cannot express (docs/protocol.md)."""

from __future__ import annotations

from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None  # else this installation is a light device
PROTOCOL = 1  # the version that `Hello.protocol` names
INLINE_BYTES = 1 << 20  # most bytes of blobs in one message, whatever server.inline_bytes is
EXTRAS = {"zstd": "zstandard"}  # encodings that need an optional package
# Encodings of parts besides plain safetensors; attune.common.exchange.encodings implements them.
ENCODINGS = ("bf16", "int8", *(name for name, package in EXTRAS.items() if find_spec(package)))
RELATIVE = ("int8",)  # encodings of a change from the served value
REWRITTEN = ("int8", "zstd")  # encodings whose blobs the server replaces by the plain values
PACKED = "zstd"  # the encoding of served values, where it makes them smaller
PER_PART = "per-part"  # a device that lists this can write each part in its own encoding
CHANGE = "change"  # a device that lists this accepts a served value as a change from what it holds (BlobRef.smaller)
EMPTY = "empty"  # a device that lists this has nothing left of the run: it asks for the model after the end, too
LOCAL_SCALE = "local-scale"  # a device that lists this standardises by its own statistics where the plan has no scale
SHARED_CHANGE = "shared-change"  # a device that lists this hands in changes of shared parts where the plan asks for them
NOISE = "noise"  # a device that lists this trains with noise where the plan asks for it (Plan.privacy)
STATISTICS = "statistics"  # a device that lists this answers questions for statistics of its data, if only with a refusal
NOISY_STATISTICS = "noisy-statistics"  # a device that lists this answers questions for statistics with noise, as above
MASKED = "masked-statistics"  # a device that lists this gives statistics of its data in a masked sum: its owner allows it
MASKED_SCALE = "masked-scale"  # beside it: its data are to be scaled by the mean and deviation of such a sum
EMBEDDING = "embedding"  # a device that lists this keeps its embedding, and hands in gradients of the hypernetwork
SCORES = "scores"  # a device that lists this scores what it would keep where the plan asks for it (train.score_after)
SAME_COHORT = "same-cohort"  # a device that lists this knows privacy.same_cohort and privacy.secure_spare
DESCRIPTION = "description"  # a device that lists this describes its data where embeddings start from it: its owner allows it
SUMS = "sums"  # a device that lists this hands in sums over its samples (--method analytic): its owner allows it
CLOSED_FORM = "closed-form"  # a device that lists this takes a closed form into its blend (Plan.closed_form)
EXACT_SUMS = "exact-sums"  # a device that lists this hands them in behind masks, where its owner need not allow it
GIVEN_MODEL = "given-model"  # a device that lists this evaluates a model as it is, by its scale (Plan.given)
MATRIX = "matrix"  # a device that lists this evaluates the networks of other devices beside its own (Plan.matrix)
SHARES = "share-model"  # beside it: the device hands in its finished network for that: its owner allows it
IN_NO_SUM = "in-no-sum"  # a device that lists this can be in the one sum over samples behind masks in the life of its home
SPENT = "its privacy budget is spent"  # the trouble of a device that trains no more, and does all else
# What Hello.encodings lists.
SPOKEN = (
    *ENCODINGS, PER_PART, LOCAL_SCALE, NOISE, SHARED_CHANGE, STATISTICS, NOISY_STATISTICS, EMBEDDING, SCORES, SAME_COHORT,
    CLOSED_FORM, EXACT_SUMS, GIVEN_MODEL, MATRIX, *([CHANGE] if PACKED in ENCODINGS else []),
)  # fmt: skip
UPLOAD_KEY = "attune-upload-bin"  # the metadata key of an upload: which blob it is (UploadTarget, serialized)
PROCESS_KEY = "attune-process"  # the metadata key of Connect: a random word of the process, to tell two with one identity apart
STATISTICS_ORDER = "statistics-"  # before the id of a question, in the exchanges of a masked sum of statistics
MOST_MOMENTS = 1 << 14  # numbers of a description of a device's data
# How a device begins its refusal of a secure sum: the server serves another start, or asks for the cohort that it is told.
SUMMED_BEFORE = "this device was in a sum over other devices from the same start"
SAMPLES_BEFORE = (
    "sums over its samples are in one sum already, and a home has one in its life: its model is that of round 1, or take part "
    "in another federation with a new home"
)
OTHER_COHORT = "this device is in sums with the devices of its first one alone"
SPARE = 1  # devices beyond the threshold in a sum of secure aggregation, unless the plan asks for more
MOST_MEMBERS = 256  # devices of a round of secure aggregation, whatever the plan says
