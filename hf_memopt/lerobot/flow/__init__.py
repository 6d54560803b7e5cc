"""The interface of flow-matching policies for reflow. Read in this order:

- `flow_policy`: the questions that each policy's adapter answers.
- `smolvla_flow`, `pi0_flow`: the answers for SmolVLA and π0, and how each computes its prefix once for two models.
- `known_flows`: which adapter belongs to a configuration.
- `reflow_options`: the fields that reflow adds to a policy's configuration.
"""
