from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Work(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORK_UNSPECIFIED: _ClassVar[Work]
    WORK_TRAIN: _ClassVar[Work]
    WORK_EVALUATE: _ClassVar[Work]

class SecureExchange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SECURE_EXCHANGE_UNSPECIFIED: _ClassVar[SecureExchange]
    SECURE_EXCHANGE_KEYS: _ClassVar[SecureExchange]
    SECURE_EXCHANGE_SHARES: _ClassVar[SecureExchange]
    SECURE_EXCHANGE_MASKED: _ClassVar[SecureExchange]
    SECURE_EXCHANGE_SURVIVORS: _ClassVar[SecureExchange]
    SECURE_EXCHANGE_UNMASKING: _ClassVar[SecureExchange]
WORK_UNSPECIFIED: Work
WORK_TRAIN: Work
WORK_EVALUATE: Work
SECURE_EXCHANGE_UNSPECIFIED: SecureExchange
SECURE_EXCHANGE_KEYS: SecureExchange
SECURE_EXCHANGE_SHARES: SecureExchange
SECURE_EXCHANGE_MASKED: SecureExchange
SECURE_EXCHANGE_SURVIVORS: SecureExchange
SECURE_EXCHANGE_UNMASKING: SecureExchange

class EnrolRequest(_message.Message):
    __slots__ = ("name", "csr_der")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    name: str
    csr_der: bytes
    def __init__(self, name: _Optional[str] = ..., csr_der: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("csr_der",)
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    csr_der: bytes
    def __init__(self, csr_der: _Optional[bytes] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("certificate_pem", "ca_pem", "name")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    ca_pem: bytes
    name: str
    def __init__(self, certificate_pem: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class DeviceMessage(_message.Message):
    __slots__ = ("hello", "progress", "trouble", "beat", "secure", "statistics", "units", "description")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    progress: Progress
    trouble: Trouble
    beat: Beat
    secure: SecureMessage
    statistics: StatisticsReport
    units: UnitReport
    description: Description
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., trouble: _Optional[_Union[Trouble, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., secure: _Optional[_Union[SecureMessage, _Mapping]] = ..., statistics: _Optional[_Union[StatisticsReport, _Mapping]] = ..., units: _Optional[_Union[UnitReport, _Mapping]] = ..., description: _Optional[_Union[Description, _Mapping]] = ...) -> None: ...

class UnitReport(_message.Message):
    __slots__ = ("verdicts",)
    class VerdictsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.ScalarMap[str, str]
    def __init__(self, verdicts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("moments",)
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    moments: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, moments: _Optional[_Iterable[float]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("every_s",)
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    def __init__(self, every_s: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "software", "profile_json", "encodings", "inline_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    software: str
    profile_json: bytes
    encodings: _containers.RepeatedScalarFieldContainer[str]
    inline_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., software: _Optional[str] = ..., profile_json: _Optional[bytes] = ..., encodings: _Optional[_Iterable[str]] = ..., inline_bytes: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("order_id", "done")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    done: float
    def __init__(self, order_id: _Optional[str] = ..., done: _Optional[float] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("order_id", "reason")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    reason: str
    def __init__(self, order_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "notice", "order", "finish", "beat", "secure", "statistics")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    notice: Notice
    order: Order
    finish: Finish
    beat: Beat
    secure: SecureMessage
    statistics: StatisticsRequest
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., secure: _Optional[_Union[SecureMessage, _Mapping]] = ..., statistics: _Optional[_Union[StatisticsRequest, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("plan_json", "inline_bytes", "waits")
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    plan_json: bytes
    inline_bytes: int
    waits: bool
    def __init__(self, plan_json: _Optional[bytes] = ..., inline_bytes: _Optional[int] = ..., waits: bool = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("id", "round", "work", "downloads", "returns", "deadline_s", "trains", "cold_start", "prior", "finish_epochs", "finish_stops", "counted")
    class PriorEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CountedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    DOWNLOADS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRAINS_FIELD_NUMBER: _ClassVar[int]
    COLD_START_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    FINISH_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FINISH_STOPS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    id: str
    round: int
    work: Work
    downloads: _containers.RepeatedCompositeFieldContainer[BlobRef]
    returns: _containers.RepeatedCompositeFieldContainer[Return]
    deadline_s: float
    trains: _containers.RepeatedScalarFieldContainer[str]
    cold_start: _containers.RepeatedCompositeFieldContainer[BlobRef]
    prior: _containers.ScalarMap[str, float]
    finish_epochs: int
    finish_stops: _containers.RepeatedScalarFieldContainer[int]
    counted: _containers.ScalarMap[int, float]
    def __init__(self, id: _Optional[str] = ..., round: _Optional[int] = ..., work: _Optional[_Union[Work, str]] = ..., downloads: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., returns: _Optional[_Iterable[_Union[Return, _Mapping]]] = ..., deadline_s: _Optional[float] = ..., trains: _Optional[_Iterable[str]] = ..., cold_start: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., prior: _Optional[_Mapping[str, float]] = ..., finish_epochs: _Optional[int] = ..., finish_stops: _Optional[_Iterable[int]] = ..., counted: _Optional[_Mapping[int, float]] = ...) -> None: ...

class BlobRef(_message.Message):
    __slots__ = ("part", "digest", "size", "version", "encoding", "data", "smaller", "base")
    PART_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SMALLER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    part: str
    digest: str
    size: int
    version: int
    encoding: str
    data: bytes
    smaller: BlobRef
    base: str
    def __init__(self, part: _Optional[str] = ..., digest: _Optional[str] = ..., size: _Optional[int] = ..., version: _Optional[int] = ..., encoding: _Optional[str] = ..., data: _Optional[bytes] = ..., smaller: _Optional[_Union[BlobRef, _Mapping]] = ..., base: _Optional[str] = ...) -> None: ...

class Return(_message.Message):
    __slots__ = ("part", "encoding")
    PART_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    part: str
    encoding: str
    def __init__(self, part: _Optional[str] = ..., encoding: _Optional[str] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("order_id", "parts", "samples", "metrics_json", "attempt")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    parts: _containers.RepeatedCompositeFieldContainer[BlobRef]
    samples: int
    metrics_json: bytes
    attempt: int
    def __init__(self, order_id: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., samples: _Optional[int] = ..., metrics_json: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class SecureMessage(_message.Message):
    __slots__ = ("order_id", "attempt", "exchange", "members", "threshold", "refused")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    attempt: int
    exchange: SecureExchange
    members: _containers.RepeatedCompositeFieldContainer[SecureMember]
    threshold: int
    refused: str
    def __init__(self, order_id: _Optional[str] = ..., attempt: _Optional[int] = ..., exchange: _Optional[_Union[SecureExchange, str]] = ..., members: _Optional[_Iterable[_Union[SecureMember, _Mapping]]] = ..., threshold: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class SecureMember(_message.Message):
    __slots__ = ("name", "mask_key", "share_key", "certificate", "signature", "secret")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARE_KEY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    name: str
    mask_key: bytes
    share_key: bytes
    certificate: bytes
    signature: bytes
    secret: bytes
    def __init__(self, name: _Optional[str] = ..., mask_key: _Optional[bytes] = ..., share_key: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., secret: _Optional[bytes] = ...) -> None: ...

class StatisticsRequest(_message.Message):
    __slots__ = ("id", "columns", "centres_json", "layout_json", "noisy_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CENTRES_JSON_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    NOISY_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    centres_json: bytes
    layout_json: bytes
    noisy_json: bytes
    def __init__(self, id: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., centres_json: _Optional[bytes] = ..., layout_json: _Optional[bytes] = ..., noisy_json: _Optional[bytes] = ...) -> None: ...

class StatisticsReport(_message.Message):
    __slots__ = ("id", "report_json", "refused", "masked")
    ID_FIELD_NUMBER: _ClassVar[int]
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    id: str
    report_json: bytes
    refused: str
    masked: bytes
    def __init__(self, id: _Optional[str] = ..., report_json: _Optional[bytes] = ..., refused: _Optional[str] = ..., masked: _Optional[bytes] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("status", "message")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Receipt.Status]
        STATUS_ACCEPTED: _ClassVar[Receipt.Status]
        STATUS_LATE: _ClassVar[Receipt.Status]
    STATUS_UNSPECIFIED: Receipt.Status
    STATUS_ACCEPTED: Receipt.Status
    STATUS_LATE: Receipt.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: Receipt.Status
    message: str
    def __init__(self, status: _Optional[_Union[Receipt.Status, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class UploadTarget(_message.Message):
    __slots__ = ("order_id", "part", "digest", "size", "offset")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    part: str
    digest: str
    size: int
    offset: int
    def __init__(self, order_id: _Optional[str] = ..., part: _Optional[str] = ..., digest: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: int
    def __init__(self, received: _Optional[int] = ...) -> None: ...

class UploadOffsetReply(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
