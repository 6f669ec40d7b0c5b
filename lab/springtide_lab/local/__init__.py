"""The local cluster: nodes made of this machine's cores, pods that are real processes."""

from springtide_lab.local.cluster import LocalCluster
from springtide_lab.local.model import LocalGroup

__all__ = ["LocalCluster", "LocalGroup"]
