"""`vlora serve --cluster`: the plan of several machines instead of options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from vlora.cli.extras import require
from vlora.cli.settings import model_path
from vlora.errors import BadConfig, BadPlan

if TYPE_CHECKING:
    from vlora.cluster.nodes.plan import ClusterPlan

REPLACED = {
    "model": "--model",
    "adapters": "--adapter",
    "folder": "--adapters",
    "replicas": "--replicas",
    "max_replicas": "--max-replicas",
    "train": "--train",
}


def read_cluster(file: Path) -> tuple[ClusterPlan, str, dict[str, str]]:
    """The plan of a cluster, its model and its adapters. Ray is not imported.

    Raises:
        BadPlan: The plan is invalid.
        BadConfig: An option is given that the plan replaces, or Ray cannot be used.
    """
    context = click.get_current_context()
    for name, option in REPLACED.items():
        if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            raise BadConfig(f"--cluster and {option} are given; the plan {file} decides that, so omit the option")
    require("cluster")
    from vlora.cluster.nodes.plan import absolute_adapters, read_cluster_plan
    from vlora.cluster.on_ray.settings import check_ray

    check_ray("--cluster")
    plan = read_cluster_plan(file)
    return plan, plan_model(file, plan), absolute_adapters(plan)


def plan_model(file: Path, plan: ClusterPlan) -> str:
    """The model of a plan: a folder relative to the plan, or a name. The same on every machine.

    Raises:
        BadPlan: There is no such folder.
    """
    folder = file.absolute().parent / Path(plan.model).expanduser()
    if folder.is_dir():
        return os.path.abspath(folder)
    try:
        model_path(plan.model, "`model`")
    except BadConfig as error:
        raise BadPlan(f"{file}: {error}") from error
    return plan.model
