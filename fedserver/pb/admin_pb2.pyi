from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeReply(_message.Message):
    __slots__ = ("connected",)
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    connected: int
    def __init__(self, connected: _Optional[int] = ...) -> None: ...

class TroublesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TroublesReply(_message.Message):
    __slots__ = ("troubles",)
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    troubles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, troubles: _Optional[_Iterable[str]] = ...) -> None: ...
