"""A replay whose transitions tell their own number: what the tests of replay share."""

import numpy as np

from apex.config import from_tables
from apex.schema import EnvSpec, aligned_bytes, intake_nbytes, sample_layout
from replay_rank.replay import Replay

SPEC = EnvSpec((1,), "float32", 1, 2**31 - 1)  # a frame is the transition's number


class Numbered(Replay):
    """A replay of transitions that tell their own number in every column."""

    def __init__(self, capacity, batch=1, index="wide", seed=0, alpha=0.6, eps=1e-6):
        replay = {"capacity": capacity, "index": index, "min_size": 1, "alpha": alpha, "eps": eps}
        config = from_tables(
            [("test", {"replay": replay, "actor": {"intake_batch": batch}, "algorithm": {"n_step": 1}})]
        )
        super().__init__(config, SPEC, np.random.default_rng(seed))
        self.next_number = 0

    def put(self, priorities):
        """Insert one batch of new transitions; return their numbers."""
        priorities = np.atleast_1d(np.asarray(priorities, np.float32))
        numbers = self.next_number + np.arange(len(priorities))
        nbytes = self.land(numbers, priorities)
        assert self.insert(nbytes) == len(numbers)
        self.next_number += len(numbers)
        return numbers.tolist()

    def land(self, numbers, priorities):
        count = len(numbers)
        views = self.store.layout.views(self.landing())
        views["header"][:] = count, count + 1, 7, 0
        views["frames"][: count + 1, 0] = np.append(numbers, numbers[-1] + 1)
        rows = np.arange(count)[:, None]
        columns = {
            "obs_frames": rows,
            "next_obs_frames": rows + 1,
            "action": numbers,
            "reward": numbers / 2,
            "discount": numbers / 4,
        }
        for name, values in (columns | {"param_version": 3 * numbers, "priority": priorities}).items():
            views[name][:count] = values
        return intake_nbytes(self.store.layout, SPEC, count + 1)

    def draw(self, batch_size):
        """Return a sample message's views and the numbers drawn, after checking that all columns agree."""
        layout = sample_layout(SPEC, batch_size)
        out = layout.views(aligned_bytes(layout.nbytes))
        self.sample(out)
        numbers = out["action"]
        for name, scale, shift in (
            ("obs", 1, 0),
            ("next_obs", 1, 1),
            ("reward", 0.5, 0),
            ("discount", 0.25, 0),
            ("param_version", 3, 0),
        ):
            assert (out[name].reshape(-1) == numbers * scale + shift).all(), name
        return out, numbers.tolist()

    def keys(self):
        """Return number -> key of all that can be drawn."""
        out, numbers = self.draw(4096)
        return dict(zip(numbers, out["key"].tolist()))

    def everything(self):
        """Return all that must not change when something is refused, as bytes."""
        held = self.index.get(np.arange(self.slots))
        numbers = (
            self.index.total,
            self.index.minimum,
            self.size,
            self.inserted,
            self.sampled,
            self.stale_updates,
            self._landing,
        )
        return b"".join(array.tobytes() for array in (held, np.array(numbers), self.generation, self.count))


def mass(priority, alpha=0.6, eps=1e-6):
    """Return (priority + eps)^alpha, raised as an array.

    NumPy raises a scalar in another way, which may differ in the last bit.
    """
    priority = np.asarray(priority, np.float32).astype(np.float64)
    return ((np.atleast_1d(priority) + eps) ** alpha).reshape(priority.shape)


def update(replay, keys, priorities):
    return replay.update_priorities(np.array(keys, np.int64), np.array(priorities, np.float32))
