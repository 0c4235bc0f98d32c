"""Templates in E2B's API: routes, bodies, builds and tags."""
