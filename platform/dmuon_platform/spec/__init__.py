"""What a job is: a frozen value, read from a file and checked, without torch or ray."""

from dmuon_platform.spec.data import DataSpec
from dmuon_platform.spec.job import JobSpec
from dmuon_platform.spec.load import job_of, load_job
from dmuon_platform.spec.model import ModelSpec
from dmuon_platform.spec.schedule import ScheduleSpec

__all__ = ["DataSpec", "JobSpec", "ModelSpec", "ScheduleSpec", "job_of", "load_job"]
