"""Mirror-SD: an on-prem LLM server that decodes speculatively across device classes."""

__version__ = "0.1.0"
