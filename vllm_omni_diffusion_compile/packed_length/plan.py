"""Which buckets waste least on the requests of a deployment."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from vllm_omni_diffusion_compile.errors import RequestError
from vllm_omni_diffusion_compile.packed_length.buckets import Buckets
from vllm_omni_diffusion_compile.settings import aligned


@dataclass(frozen=True, kw_only=True)
class BucketUse:
    """What one bucket is used for.

    Args:
        length: Of the bucket, in rows.
        requests: That get it.
        used_rows: Their rows that are not padding.
        shortest: Fewest used rows among them; the length itself if nothing uses it.
    """

    length: int
    requests: int
    used_rows: int
    shortest: int

    @property
    def padded_rows(self) -> int:
        """Rows of padding."""
        return self.requests * self.length - self.used_rows

    @property
    def mean_waste(self) -> float:
        """Share of the rows that is padding."""
        return self.padded_rows / (self.requests * self.length) if self.requests else 0.0

    @property
    def worst_waste(self) -> float:
        """Share of padding of the request that wastes most."""
        return (self.length - self.shortest) / self.length

    @property
    def attention_cost(self) -> int:
        """Pairs of rows that attention compares, summed over the requests."""
        return self.requests * self.length**2


def plan_count(requests: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Return at most `count` packed lengths with the least padding in all.

    Args:
        requests: How many requests use so many rows.
        count: How many lengths there may be.

    Raises:
        RequestError: There are no requests, or `count` is no positive number.
    """
    if count < 1:
        raise RequestError(f"count is {count}, expected at least 1 bucket")
    groups = _Groups(requests)
    layers = groups.layers()
    for _ in range(min(count, len(groups.lengths))):
        next(layers)
    return groups.chosen()


def plan_waste(requests: Mapping[int, int], waste: float) -> tuple[int, ...]:
    """Return the fewest packed lengths with which at most a share of all rows is padding.

    Args:
        requests: How many requests use so many rows.
        waste: The share, between 0 and 1.

    Raises:
        RequestError: There are no requests, or even a length for each of them wastes more.
    """
    if not 0 < waste < 1:
        raise RequestError(f"waste is {waste}, expected a share between 0 and 1")
    groups = _Groups(requests)
    # The padding p for which p is that share of p and the used rows together.
    allowed = Fraction(repr(float(waste)))
    most = int(groups.used_rows * allowed / (1 - allowed))
    if groups.least_padded > most:
        least = groups.least_padded / (groups.least_padded + groups.used_rows)
        raise RequestError(
            f"waste is {waste}, expected at least {least:.4f}, the share that rounding to 64 rows wastes"
        )
    for padded in groups.layers():
        if padded <= most:
            break
    return groups.chosen()


def uses(requests: Mapping[int, int], buckets: Buckets) -> list[BucketUse]:
    """Return what each bucket is used for; a request that none holds gets a length of its own, as a server gives it."""
    found: dict[int, list[int]] = {length: [0, 0, length] for length in buckets.lengths}
    for used, count in requests.items():
        length = buckets.covering(used) or aligned(used)
        use = found.setdefault(length, [0, 0, length])
        use[0] += count
        use[1] += used * count
        use[2] = min(use[2], used)
    return [
        BucketUse(length=length, requests=count, used_rows=rows, shortest=shortest)
        for length, (count, rows, shortest) in sorted(found.items())
    ]


class _Groups:
    """Requests grouped by the shortest packed length that holds them: no other length can be worth having.

    `layers` is dynamic programming over the number of buckets. The least padding of the groups up to j with k buckets
    is the least, over the group i after which the last bucket starts, of

    - the least padding of the groups up to i with k - 1 buckets, and
    - the length of group j times the requests from i to j, less the rows that these use.

    For a fixed i that is a line in the length of group j, and its slope falls with i: the lower hull of the lines is
    kept in a queue, and each group costs constant time.
    """

    def __init__(self, requests: Mapping[int, int]) -> None:
        if not requests:
            raise RequestError("there are no requests, expected at least one")
        counts: dict[int, int] = {}
        rows: dict[int, int] = {}
        for used, count in requests.items():
            length = max(aligned(used), aligned(1))
            counts[length] = counts.get(length, 0) + count
            rows[length] = rows.get(length, 0) + used * count
        self.lengths = sorted(counts)
        self.used_rows = sum(rows.values())
        self.least_padded = sum(length * counts[length] for length in self.lengths) - self.used_rows
        # Sums over the groups before each.
        self._counts = [0]
        self._rows = [0]
        for length in self.lengths:
            self._counts.append(self._counts[-1] + counts[length])
            self._rows.append(self._rows[-1] + rows[length])
        self._starts: list[array[int]] = []

    def layers(self) -> Iterator[int]:
        """Add one bucket at a time; yield the least padded rows with so many."""
        ends = len(self.lengths) + 1
        least = [self._padded(0, end) if end else 0 for end in range(ends)]
        self._starts = [array("l", bytes(array("l").itemsize * ends))]
        yield least[-1]
        for buckets in range(2, len(self.lengths) + 1):
            least, starts = self._layer(least, buckets)
            self._starts.append(starts)
            yield least[-1]

    def chosen(self) -> tuple[int, ...]:
        """Return the lengths of the last layer."""
        lengths: list[int] = []
        end = len(self.lengths)
        for starts in reversed(self._starts):
            lengths.append(self.lengths[end - 1])
            end = starts[end]
        return tuple(reversed(lengths))

    def _padded(self, start: int, end: int) -> int:
        """Padded rows of the groups from `start` up to `end` in the bucket of the last of them."""
        return self.lengths[end - 1] * (self._counts[end] - self._counts[start]) - (self._rows[end] - self._rows[start])

    def _layer(self, before: list[int], buckets: int) -> tuple[list[int], array[int]]:
        counts, rows = self._counts, self._rows
        ends = len(self.lengths) + 1
        least = [0] * ends
        starts = array("l", bytes(array("l").itemsize * ends))
        # Slope, value at 0 and start of each line of the hull.
        hull: deque[tuple[int, int, int]] = deque()
        for end in range(buckets, ends):
            start = end - 1
            slope, height = -counts[start], before[start] + rows[start]
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], slope, height):
                hull.pop()
            hull.append((slope, height, start))
            length = self.lengths[end - 1]
            while len(hull) > 1 and hull[1][0] * length + hull[1][1] <= hull[0][0] * length + hull[0][1]:
                hull.popleft()
            slope, height, starts[end] = hull[0]
            least[end] = slope * length + height + length * counts[end] - rows[end]
        return least, starts


def _is_above(first: tuple[int, int, int], middle: tuple[int, int, int], slope: int, height: int) -> bool:
    """Whether the middle one of three lines is nowhere the lowest."""
    return (height - first[1]) * (first[0] - middle[0]) <= (middle[1] - first[1]) * (first[0] - slope)
