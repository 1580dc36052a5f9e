//! What the frame plane sends datagrams by.

use longhaul_protocol::HostId;
use longhaul_transport::PlaneSocket;

pub use longhaul_transport::Way;

/// Why datagrams were not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// A datagram is longer than this host's own network carries.
    #[error("datagrams of {0} bytes are longer than the interface carries")]
    TooLong(usize),
    /// There is no room. Frames are dropped then, as a full queue of a network card drops them.
    #[error("no room to send")]
    Full,
    /// Something else.
    #[error("{0}")]
    Other(String),
}

/// Sends batches of datagrams, from any thread.
pub trait Outlet: Send + Sync + 'static {
    /// Sends datagrams of `stride` bytes each to a peer on a way; the last one may be shorter. Does
    /// not wait for long.
    fn send(
        &self,
        peer: HostId,
        way: Way,
        datagrams: &[u8],
        stride: usize,
    ) -> Result<(), SendError>;
}

impl Outlet for PlaneSocket {
    fn send(
        &self,
        peer: HostId,
        way: Way,
        datagrams: &[u8],
        stride: usize,
    ) -> Result<(), SendError> {
        use longhaul_transport::PlaneError;
        PlaneSocket::send(self, peer, way, datagrams, stride).map_err(|error| match error {
            PlaneError::TooLong(bytes) => SendError::TooLong(bytes),
            PlaneError::Full => SendError::Full,
            error => SendError::Other(error.to_string()),
        })
    }
}
