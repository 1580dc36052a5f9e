//! What the API shows of network paths.

use longhaul_api::PathUse;
use longhaul_transport::PathTo;
use std::net::SocketAddr;

/// Returns what a network path has carried, for the API.
pub(crate) fn path_use(path: PathTo, sent_bytes: u64, up: bool) -> PathUse {
    let to = SocketAddr::new(path.to.ip().to_canonical(), path.to.port());
    PathUse {
        to: to.to_string(),
        from: path.from.map(|from| from.to_string()),
        sent_bytes,
        up,
    }
}
