"""A part of the classic package that is not provided here."""

raise ImportError(
    "verifiers.envs.integrations belongs to the hosted or experimental part of the classic verifiers, "
    "which this package does not provide; vf.ToolEnv, vf.SandboxEnv and verifiers.integrations are what there is.",
    name=__name__,
)
