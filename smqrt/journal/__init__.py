"""The journal: what flowed through a hub, in order, for pipelines, tools and replays (design: pipeline)."""
