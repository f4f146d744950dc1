"""Errors that are neither a mistake of the user (ValueError) nor a bug of ours (AssertionError), and checks."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError with this message for a mistake of the user."""
    if not condition:
        raise ValueError(message)


def require_at_least(config: object, table: str, **least: float) -> None:
    """Raises ValueError for the first of these fields of a config that is below its bound; table: their prefix, such as
    "checkpoint."."""
    for name, bound in least.items():
        value = getattr(config, name)
        require(value >= bound, f"{table}{name} must be >= {bound}, got {value}")


class RunFailure(RuntimeError):
    """A run that cannot go on for a reason that one line tells. Commands print the line and end with code 1."""


class NonFiniteError(RunFailure):
    """Too many steps in a row had a NaN or infinite loss or gradient."""


class RendezvousError(RunFailure):
    """Not all processes of the run came together; the message names those that are missing, or the reason."""


class HealthError(RunFailure):
    """A node is not fit to train on; the message names it and what is wrong."""


class OutOfMemoryError(RunFailure):
    """Memory ran out; the message says at which sizes and what to set."""


class PeerError(RunFailure):
    """Another rank is gone, so that this one cannot go on."""


class LossSpikeError(RunFailure):
    """The loss spikes again and again although the run has gone back and left data out."""


class ReplicaError(RunFailure):
    """Ranks that should hold the same weights do not; the message names them."""
