//! The agent's REST API: its types, its OpenAPI description and a client.
