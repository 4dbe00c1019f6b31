"""The manifests for Kubernetes: their names, numbers and ports fit together, and they keep their kinds' schemas."""
import pytest
import yaml

from tests.website import ROOT

READS = ["examples/kubernetes/*", "chapters/80_job_managers.md"]
FOLDER = ROOT / "examples" / "kubernetes"


@pytest.fixture
def objects():
    return {one["kind"]: one for path in FOLDER.glob("*.yaml") for one in yaml.safe_load_all(path.read_text())}


def test_the_agents_of_a_job_meet_at_its_first_pod(objects):
    job, service = objects["Job"], objects["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    options = dict(arg.removeprefix("--").split("=") for arg in pod["containers"][0]["args"] if arg.startswith("--"))
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert options["rdzv-endpoint"] == f"{job['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert int(options["nproc-per-node"]) == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


def test_a_rank_has_a_gpu_in_a_trainjob(objects):
    trainer = objects["TrainJob"]["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


@pytest.mark.full
def test_job_and_service_keep_the_schemas_of_kubernetes(objects):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, for its schemas")
    for kind in ("Job", "Service"):
        validator.validate(objects[kind], "1.37", strict=True)


@pytest.mark.full
def test_a_trainjob_has_only_fields_that_kubeflow_knows(objects):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    read = models.TrainerV1alpha1TrainJob.from_dict(objects["TrainJob"])
    assert read.to_dict() == objects["TrainJob"]


def test_the_page_shows_the_manifests_as_they_are():
    page = (ROOT / "chapters" / "80_job_managers.md").read_text("utf-8")
    assert all(f"```yaml\n{path.read_text('utf-8')}```" in page for path in FOLDER.glob("*.yaml"))
