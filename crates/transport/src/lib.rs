//! Host identities, trust, and the connections between hosts.
