"""Tests of GPyTorch's and BoTorch's that need not pass on accelerated models, and why each is not a fault."""

from __future__ import annotations

_MIXED = (
    "Training inputs are float64 and parameters float32, which GPyTorch lets pass; accelerate refuses it, naming the "
    "parameter and the remedy."
)
_FILL = (
    "Expects GPyTorch's warning that the fill policy makes the matrix dense, which sketchgp does not do: it solves for "
    "the rows that were observed, for the same mean."
)
_STALE = (
    "Raises the noise after a prediction and expects the variance that the first one has cached; sketchgp gives "
    "that of the present noise: 8% of it, where the test allows 5%."
)

DEFAULT = {
    **{
        f"test/examples/{file}::test_posterior_latent_gp_and_likelihood_fast_pred_var": _STALE
        for file in (
            "test_simple_gp_regression.py::TestSimpleGPRegression",
            "test_white_noise_regression.py::TestWhiteNoiseGPRegression",
        )
    },
    "test/examples/test_kissgp_gp_regression.py::TestKISSGPRegression::test_kissgp_gp_fast_pred_var": _STALE,
    "test/examples/test_kissgp_white_noise_regression.py::TestKISSGPWhiteNoiseRegression"
    "::test_kissgp_gp_fast_pred_var": _STALE,
    "test/examples/test_missing_data.py::TestMissingData::test_single": _FILL,
    "test/examples/test_missing_data.py::TestMissingData::test_multitask": _FILL,
    "test/mlls/test_leave_one_out_pseudo_likelihood.py::TestLeaveOneOutPseudoLikelihood::test_check_bordered_system": (
        _MIXED
    ),
    "test/kernels/test_additive_and_product_kernels.py::TestAdditiveAndProductKernel"
    "::test_kernel_output_no_structure": (
        "Asks for the class of a prior covariance, which is a KernelMatrix where sketchgp solves; its entries are the "
        "same."
    ),
    "test/kernels/test_additive_and_product_kernels.py::TestAdditiveAndProductKernel::test_kernel_output": (
        "Asks for a sum of operators, which is one dense matrix where a part of it is dense; its entries are the same."
    ),
}
ITERATIVE = {
    **DEFAULT,
    "test/examples/test_lowrank_gp_regression.py::TestLinearRegressionLargeD::test_mean_abs_error": (
        "Counts calls of torch's Cholesky factorization; the preconditioner makes one more."
    ),
}
_TRACED = (
    "torch.jit.trace of a posterior: a trace cannot hold what an accelerated model decides while it predicts; "
    "docs/sharp-bits.md says to trace a restored copy."
)
BOTORCH = {
    "test/models/test_gpytorch.py::TestBatchedMultiOutputGPyTorchModel::test_posterior_in_trace_mode": _TRACED,
    "test/optim/closures/test_model_closures.py::TestLossClosures::test_with_input_transforms": (
        "Counts calls of the likelihood; a posterior asks it for the noise of the training rows once more."
    ),
}
# Their acquisition functions take densities of many thousand posteriors at up to 13 points, each of which would get a
# preconditioner of its own: not done in an hour.  By default these are factorized, and the tests take a minute.
UNFINISHED = {
    "iterative": (
        "test/acquisition/test_bayesian_active_learning.py::TestQBayesianActiveLearningByDisagreement"
        "::test_q_bayesian_active_learning_by_disagreement_single_objective",
        "test/acquisition/test_joint_entropy_search.py::TestQJointEntropySearch",
        "test/acquisition/multi_objective/test_joint_entropy_search.py::TestQLowerBoundMultiObjectiveJointEntropySearch",
    )
}
DIFFERENCES = {
    "gpytorch": {"default": DEFAULT, "iterative": ITERATIVE},
    "botorch": {"default": BOTORCH, "iterative": BOTORCH},
}
