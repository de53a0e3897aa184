from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeReply(_message.Message):
    __slots__ = ("connected",)
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    connected: int
    def __init__(self, connected: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("paused",)
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    def __init__(self, paused: bool = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("phase", "round")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    phase: str
    round: int
    def __init__(self, phase: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class NewTokenRequest(_message.Message):
    __slots__ = ("uses", "ttl_s", "only_for")
    USES_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ONLY_FOR_FIELD_NUMBER: _ClassVar[int]
    uses: int
    ttl_s: float
    only_for: str
    def __init__(self, uses: _Optional[int] = ..., ttl_s: _Optional[float] = ..., only_for: _Optional[str] = ...) -> None: ...

class NewTokenReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class TokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokensReply(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "state", "origin", "uses", "uses_left", "made_at", "expires_at", "only_for", "devices")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    USES_LEFT_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    ONLY_FOR_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    origin: str
    uses: int
    uses_left: int
    made_at: float
    expires_at: float
    only_for: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., origin: _Optional[str] = ..., uses: _Optional[int] = ..., uses_left: _Optional[int] = ..., made_at: _Optional[float] = ..., expires_at: _Optional[float] = ..., only_for: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("id", "devices")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    id: str
    devices: bool
    def __init__(self, id: _Optional[str] = ..., devices: bool = ...) -> None: ...

class RevokeTokenReply(_message.Message):
    __slots__ = ("revoked",)
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    revoked: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revoked: _Optional[_Iterable[str]] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RevokeReply(_message.Message):
    __slots__ = ("connected",)
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    connected: int
    def __init__(self, connected: _Optional[int] = ...) -> None: ...

class StatisticsQuestion(_message.Message):
    __slots__ = ("columns", "patience_s")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    patience_s: float
    def __init__(self, columns: _Optional[_Iterable[str]] = ..., patience_s: _Optional[float] = ...) -> None: ...

class StatisticsAnswer(_message.Message):
    __slots__ = ("statistics_json",)
    STATISTICS_JSON_FIELD_NUMBER: _ClassVar[int]
    statistics_json: bytes
    def __init__(self, statistics_json: _Optional[bytes] = ...) -> None: ...

class TroublesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TroublesReply(_message.Message):
    __slots__ = ("troubles",)
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    troubles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, troubles: _Optional[_Iterable[str]] = ...) -> None: ...
