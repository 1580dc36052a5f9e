//! What the frame plane sends datagrams by.

use longhaul_protocol::HostId;

/// The way on which datagrams travel to a peer, or came from it.
pub type Way = longhaul_paths::Route;

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
