"""A simple simulated cluster and cloud behind the same ports, for services in virtual time."""

from springtide_lab.simulated.cluster import SimulatedCluster, SimulatedNodes
from springtide_lab.simulated.model import (
    ClusterModel,
    GroupModel,
    LognormalWork,
    MeasuredWork,
    TaskRun,
    WorkModel,
)

__all__ = [
    "ClusterModel",
    "GroupModel",
    "LognormalWork",
    "MeasuredWork",
    "SimulatedCluster",
    "SimulatedNodes",
    "TaskRun",
    "WorkModel",
]
