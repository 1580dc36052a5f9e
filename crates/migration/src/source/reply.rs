//! Replies to writes of a guest that wait for the destination.

use longhaul_storage::front::telling::ToServer;
use tokio::sync::mpsc;

/// A write that waits for its reply to the guest.
pub(crate) struct Reply {
    line: mpsc::UnboundedSender<ToServer>,
    id: u64,
}

impl Reply {
    /// Creates the reply to the request that the server on this line has named so.
    pub(crate) fn new(line: mpsc::UnboundedSender<ToServer>, id: u64) -> Self {
        Self { line, id }
    }

    /// Lets the write complete for the guest.
    pub(crate) fn answer(self) {
        // A server that is gone has replied already, or its guest repeats the request.
        let _ = self.line.send(ToServer::Answered(self.id));
    }
}
