"""Places for so many, of which no tenant takes those of others for itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from scheduler_service.request_lives.life import Life


class SharedPlaces:
    """Lives by key. If all places are taken, whoever has most gives one up.

    `gives_oldest`: its oldest, or else its youngest.
    """

    def __init__(self, num_places: int, *, gives_oldest: bool) -> None:
        self._num_places = num_places
        self._gives_oldest = gives_oldest
        self._lives: dict[str, Life] = {}
        self._by_tenant: dict[str, OrderedDict[str, Life]] = {}

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def get(self, key: str) -> Life | None:
        """None if it has no place."""
        return self._lives.get(key)

    def add(self, life: Life) -> None:
        """Gives it a place, perhaps somebody else's; one that has its key loses that."""
        self.remove(life.key)
        self._lives[life.key] = life
        self._by_tenant.setdefault(life.tenant, OrderedDict())[life.key] = life
        if len(self._lives) > self._num_places:
            most = max(self._by_tenant.values(), key=len)
            self.remove(next(iter(most) if self._gives_oldest else reversed(most)))

    def remove(self, key: str) -> Life | None:
        """Takes it out; None if it has no place."""
        life = self._lives.pop(key, None)
        if life is not None:
            of_tenant = self._by_tenant[life.tenant]
            del of_tenant[key]
            if not of_tenant:
                del self._by_tenant[life.tenant]
        return life
