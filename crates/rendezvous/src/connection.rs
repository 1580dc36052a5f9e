//! Serves one connection, of a host or of another server: its messages, address and datagrams.

use crate::shared::{Out, Seat, Shared};
use longhaul_protocol::HostId;
use longhaul_realm::server::{ConnId, Input};
use longhaul_realm::wire::decode;
use longhaul_transport::{
    CloseCode, Received, RendezvousHandle, RendezvousLink, RendezvousReceiver, RendezvousSender,
    RendezvousServer,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

/// How often the address of a connection is compared: a NAT may have changed it.
const LOOK: Duration = Duration::from_secs(1);

/// Serves a connection until it ends.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    transport: Arc<RendezvousServer>,
    link: RendezvousLink,
) {
    let RendezvousLink {
        handle,
        sender,
        receiver,
    } = link;
    let peer = handle.peer();
    let is_server = shared.read(|server| server.servers().iter().any(|one| one.id == peer));
    let Seat {
        conn,
        out,
        stand_in,
    } = shared.enter(handle.datagrams());
    let rtt_ms = u16::try_from(handle.rtt().as_millis()).unwrap_or(u16::MAX);
    let seen = stand_in.unwrap_or_else(|| handle.address());
    shared.input(match is_server {
        true => Input::ServerConnected {
            conn,
            server: peer,
            rtt_ms,
        },
        false => Input::Connected {
            conn,
            host: peer,
            observed: seen,
            by_udp: stand_in.is_none(),
            rtt_ms,
        },
    });
    tracing::debug!(%peer, address = %handle.address(), is_server, "connected");
    let writing = tokio::spawn(write(sender, out, handle.clone()));
    let mut reading = Reading {
        shared: shared.clone(),
        transport,
        handle,
        conn,
        is_server,
        stand_in,
        seen,
    };
    reading.read(receiver).await;
    shared.leave(conn);
    if writing.await.is_err() {
        tracing::error!("the task of a connection broke");
    }
    tracing::debug!(%peer, "disconnected");
}

/// Sends what the state machine says, until it ends the connection or forgets it.
async fn write(
    mut sender: RendezvousSender,
    mut out: mpsc::Receiver<Out>,
    handle: RendezvousHandle,
) {
    loop {
        match out.recv().await {
            Some(Out::Message(message)) => {
                if sender.send(message).await.is_err() {
                    return;
                }
            }
            Some(Out::Close(reason)) => return sender.close(CloseCode::Done, &reason).await,
            None => return handle.close(CloseCode::Done, "the server ended the connection"),
        }
    }
}

struct Reading {
    shared: Arc<Shared>,
    transport: Arc<RendezvousServer>,
    handle: RendezvousHandle,
    conn: ConnId,
    is_server: bool,
    stand_in: Option<SocketAddr>,
    seen: SocketAddr,
}

impl Reading {
    async fn read(&mut self, mut receiver: RendezvousReceiver) {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let received = tokio::select! {
                received = receiver.recv() => received,
                _ = look.tick() => {
                    self.look();
                    continue;
                }
            };
            match received {
                Ok(Some(Received::Message(bytes))) => {
                    self.look();
                    if let Err(reason) = self.message(&bytes) {
                        tracing::info!(peer = %self.handle.peer(), reason, "ended a connection");
                        return self.handle.close(CloseCode::Violation, &reason);
                    }
                }
                Ok(Some(Received::Datagram(datagram))) => self.datagram(&datagram),
                Ok(None) => return,
                Err(error) => return tracing::debug!(%error, "a connection ended"),
            }
        }
    }

    fn look(&mut self) {
        if self.stand_in.is_some() {
            return;
        }
        let observed = self.handle.address();
        if observed != self.seen {
            self.seen = observed;
            let conn = self.conn;
            self.shared.input(Input::Moved { conn, observed });
        }
    }

    fn message(&self, bytes: &[u8]) -> Result<(), String> {
        let text = |error: longhaul_realm::wire::WireError| error.to_string();
        let input = match self.is_server {
            true => Input::Broker(self.conn, decode(bytes).map_err(text)?),
            false => Input::Message(self.conn, decode(bytes).map_err(text)?),
        };
        self.shared.input(input);
        Ok(())
    }

    fn datagram(&self, datagram: &[u8]) {
        let Some(from) = self.stand_in else {
            return;
        };
        if let Some(to) = self.shared.relayed(from, datagram) {
            self.transport.relay_sender().send(to, datagram);
        }
    }
}

/// Returns a short name of a host or server, for logs.
pub(crate) fn short(id: HostId) -> String {
    let id = id.to_string();
    id.get(..19).unwrap_or(&id).to_owned()
}
