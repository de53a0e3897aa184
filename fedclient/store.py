"""Store of a device, as a port with two implementations: the folder of its home, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from attune.common.durable import PRIVATE, PUBLIC, write_file
from attune.fedclient.home import DeviceHome
from attune.fedclient.resource_limits import ResourceLimits

if TYPE_CHECKING:
    from torch import Tensor

    from attune.common.plan import Plan
    from attune.fedclient.model.model_info import ModelInfo
    from attune.fedclient.work.orders import OrderStore


KeptName = Literal["plan", "statistics", "sums"]  # the plan as JSON; MemberState of masked statistics; SumBook


class Store(Protocol):
    """Plan, orders and finished model of one device. Methods that write raise DiskFull."""

    @property
    def where(self) -> str:
        """Name of the store in errors."""

    def kept(self, what: KeptName) -> bytes | None:
        """Return what was kept: of the run the plan, of the home's whole life the rest; None: nothing."""

    def keep(self, what: KeptName, data: bytes) -> None:
        """Keep it durably in place of what was kept before."""

    @property
    def has_model(self) -> bool:
        """True if there is a finished model."""

    def put_aside(self, run: str, orders: int, keeps_model: bool = False) -> str:
        """Put plan, orders and model of a run with so many orders aside, and return where they are kept.

        `keeps_model`: the model also stays, to predict with.
        """

    def take_back(self, plan: Plan) -> str:
        """Take up orders and model of a run that was put aside under this plan; return where they were, or nothing."""

    def spent(self) -> int:
        """Return how many orders were carried out in runs that were put aside."""

    def check_room(self, resources: ResourceLimits, coming_bytes: int) -> None:
        """Check that the owner allows `coming_bytes` more.

        Raises:
            LimitExceeded: That is too much.
        """

    def orders(self, who: str) -> OrderStore:
        """Return the orders of the device `who`. This imports torch, so only the thread of tensors may call it."""

    def keep_model(self, info: ModelInfo, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path | None:
        """Write the finished model in place of an older one, and return its folder, if it is in files."""


class FolderStore:
    """Store in a device's home. The caller holds the home's lock."""

    def __init__(self, home: DeviceHome) -> None:
        self._home = home

    @property
    def where(self) -> str:
        return str(self._home.path)

    def kept(self, what: KeptName) -> bytes | None:
        place: Path = getattr(self._home, what)
        return place.read_bytes() if place.exists() else None

    def keep(self, what: KeptName, data: bytes) -> None:
        write_file(getattr(self._home, what), data, PUBLIC if what == "plan" else PRIVATE)

    @property
    def has_model(self) -> bool:
        return self._home.model.exists()

    def put_aside(self, run: str, orders: int, keeps_model: bool = False) -> str:
        return str(self._home.put_aside(run, orders, keeps_model))

    def take_back(self, plan: Plan) -> str:
        place = self._home.take_back(plan)
        return "" if place is None else str(place)

    def spent(self) -> int:
        return self._home.spent()

    def check_room(self, resources: ResourceLimits, coming_bytes: int) -> None:
        resources.check_disk(self._home.path, coming_bytes)

    def orders(self, who: str) -> OrderStore:
        from attune.fedclient.work.state import FolderOrders

        return FolderOrders(self._home.orders, who)

    def keep_model(self, info: ModelInfo, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path | None:
        from attune.fedclient.model.model_info import save

        return save(self._home.model, info, tensors, self._home.sign)


class MemoryStore:
    """Store in memory. `model` is the finished model, once there is one."""

    def __init__(self) -> None:
        self.model: tuple[ModelInfo, Mapping[str, Mapping[str, Tensor]]] | None = None
        self._kept: dict[KeptName, bytes] = {}
        self._orders: OrderStore | None = None
        self._spent = 0

    @property
    def where(self) -> str:
        return "this device's memory"

    def kept(self, what: KeptName) -> bytes | None:
        return self._kept.get(what)

    def keep(self, what: KeptName, data: bytes) -> None:
        self._kept[what] = data

    @property
    def has_model(self) -> bool:
        return self.model is not None

    def put_aside(self, run: str, orders: int, keeps_model: bool = False) -> str:
        self._orders = None
        self._kept.pop("plan", None)
        self._spent += orders
        return "nowhere: it was in memory"

    def take_back(self, plan: Plan) -> str:
        return ""

    def spent(self) -> int:
        return self._spent

    def check_room(self, resources: ResourceLimits, coming_bytes: int) -> None:
        """Accept everything, because no file is written."""

    def orders(self, who: str) -> OrderStore:
        if self._orders is None:
            from attune.fedclient.work.orders import MemoryOrders

            self._orders = MemoryOrders(who)
        return self._orders

    def keep_model(self, info: ModelInfo, tensors: Mapping[str, Mapping[str, Tensor]]) -> Path | None:
        self.model = info, tensors
        return None
