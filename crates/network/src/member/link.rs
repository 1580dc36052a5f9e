//! Connects to a server, and passes its messages to the driver.

use super::Leg;
use super::driver::Incoming;
use bytes::Bytes;
use longhaul_protocol::HostId;
use longhaul_realm::ruleset::ServerEntry;
use longhaul_transport::{
    ConnectError, Endpoint, Received, RendezvousHandle, RendezvousLink, RendezvousProtocol,
    RendezvousReceiver, RendezvousSender,
};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::sleep;

/// How long UDP has to answer before TCP is tried too.
const UDP_ALONE: Duration = Duration::from_secs(3);
/// Messages that wait to be sent to a server.
const MESSAGES_WAITING: usize = 256;
/// Relayed datagrams that wait for who takes them.
const DATAGRAMS_WAITING: usize = 1024;

/// A connection to a server, for the driver.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) handle: RendezvousHandle,
    pub(super) out: mpsc::Sender<Vec<u8>>,
    pub(super) leg: Option<Leg>,
    pub(super) way: &'static str,
}

/// Connects over UDP, or over TCP if UDP does not answer, and serves the connection. `number`
/// names the try.
pub(super) async fn run(
    endpoint: Endpoint,
    entry: ServerEntry,
    protocol: RendezvousProtocol,
    number: u64,
    driver: mpsc::Sender<Incoming>,
) {
    let server = entry.id;
    let error = match connect_server(&endpoint, &entry, &protocol).await {
        Ok(link) => serve(link, server, number, &driver).await,
        Err(error) => error.to_string(),
    };
    // Fails only when the driver has stopped.
    let _ = driver.send(Incoming::Down(server, number, error)).await;
}

/// Connects to a server over UDP, or over TCP if UDP does not answer.
pub async fn connect_server(
    endpoint: &Endpoint,
    entry: &ServerEntry,
    protocol: &RendezvousProtocol,
) -> Result<RendezvousLink, ConnectError> {
    let by_udp: Vec<String> = entry.udp_addresses().map(str::to_owned).collect();
    let by_tcp: Vec<String> = entry.tcp_addresses().map(str::to_owned).collect();
    let udp = endpoint.connect_rendezvous(entry.id, &by_udp, protocol);
    let tcp = endpoint.connect_rendezvous_tcp(entry.id, &by_tcp, protocol);
    if by_tcp.is_empty() {
        return udp.await;
    }
    if by_udp.is_empty() {
        return tcp.await;
    }
    tokio::pin!(udp);
    tokio::select! {
        link = &mut udp => match link {
            Err(ConnectError::Unreachable { .. } | ConnectError::Lost { .. }) => return tcp.await,
            link => return link,
        },
        () = sleep(UDP_ALONE) => {}
    }
    tokio::pin!(tcp);
    tokio::select! {
        link = &mut udp => match link {
            Ok(link) => Ok(link),
            Err(_) => tcp.await,
        },
        link = &mut tcp => match link {
            Ok(link) => Ok(link),
            Err(_) => udp.await,
        },
    }
}

async fn serve(
    link: RendezvousLink,
    server: HostId,
    number: u64,
    driver: &mpsc::Sender<Incoming>,
) -> String {
    let RendezvousLink {
        handle,
        sender,
        receiver,
    } = link;
    let (out, waiting) = mpsc::channel(MESSAGES_WAITING);
    let (leg, datagrams) = match handle.datagrams() {
        Some(send) => {
            let (datagrams, receive) = mpsc::channel(DATAGRAMS_WAITING);
            (Leg::Tcp { send, receive }, Some(datagrams))
        }
        None => (Leg::Udp(handle.address()), None),
    };
    let up = Up {
        handle: handle.clone(),
        out,
        way: if datagrams.is_some() { "TCP" } else { "QUIC" },
        leg: Some(leg),
    };
    if driver.send(Incoming::Up(server, number, up)).await.is_err() {
        return "the agent stops".to_owned();
    }
    let sending = tokio::spawn(send(sender, waiting, handle));
    let error = receive(receiver, (server, number), driver, datagrams).await;
    sending.abort();
    error
}

async fn send(
    mut sender: RendezvousSender,
    mut waiting: mpsc::Receiver<Vec<u8>>,
    handle: RendezvousHandle,
) {
    while let Some(message) = waiting.recv().await {
        if sender.send(message).await.is_err() {
            return;
        }
    }
    // The driver has ended the connection.
    drop(handle);
    sender
        .close(longhaul_transport::CloseCode::Done, "no longer needed")
        .await;
}

async fn receive(
    mut receiver: RendezvousReceiver,
    (server, number): (HostId, u64),
    driver: &mpsc::Sender<Incoming>,
    datagrams: Option<mpsc::Sender<Bytes>>,
) -> String {
    loop {
        match receiver.recv().await {
            Ok(Some(Received::Message(bytes))) => {
                let message = Incoming::Message(server, number, bytes);
                if driver.send(message).await.is_err() {
                    return "the agent stops".to_owned();
                }
            }
            Ok(Some(Received::Datagram(datagram))) => {
                // With a full queue it is lost, as in a router.
                let _ = datagrams.as_ref().map(|queue| queue.try_send(datagram));
            }
            Ok(None) => return "the server ended the connection".to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}
