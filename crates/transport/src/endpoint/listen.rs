//! Accepts incoming connections: handshake, admission, Hello; each within limits.
//!
//! ```text
//! Incoming -- handshake --> key proven -- trust store --> trusted
//!    | too many: Retry, refuse            | unknown: IdentityUnknown
//!                                         | no scope at all: NotAllowed
//! trusted -- control --> Hellos --> versions agree --> Control
//!         -- bulk ----> opening --> token redeemed --> BulkReceiver
//!                               --> probe, may query --> counted and discarded
//! ```

use super::{CONTROL_WINDOW_BYTES, EndpointInner, receive_hello, send_hello};
use crate::bulk::{BulkPurpose, BulkReceiver, read_opening};
use crate::control::{CHANNELS_MAX, Control};
use crate::error::{CloseCode, LinkError};
use crate::keeper;
use crate::quic::{ConnectionError, HandshakeData, Incoming, Link, SendStream, VarInt};
use crate::tls::ALPN_BULK;
use crate::trust::{Permission, Scope, TrustedHost};
use longhaul_protocol::HostId;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tracing::{debug, info, warn};

/// How long an incompatible peer may take to report that itself.
const INCOMPATIBLE_LINGER: Duration = Duration::from_secs(2);

/// A refusal: the code and the reason sent to the peer.
type Refusal = (CloseCode, String);

pub(super) async fn listen(endpoint: Arc<EndpointInner>, controls: mpsc::Sender<Control>) {
    while let Some((incoming, permit)) = endpoint.next_handshake().await {
        tokio::spawn(receive(
            endpoint.clone(),
            incoming,
            permit,
            controls.clone(),
        ));
    }
}

impl EndpointInner {
    /// Returns the next connection whose handshake may begin; `None` when the endpoint is closed.
    pub(crate) async fn next_handshake(&self) -> Option<(Incoming, OwnedSemaphorePermit)> {
        loop {
            let incoming = self.quic.accept().await?;
            if let Ok(permit) = self.handshakes.clone().try_acquire_owned() {
                return Some((incoming, permit));
            }
            debug!(address = %incoming.remote_address(), "too many handshakes at once");
            // An answer to a Retry proves the peer's address.
            if let Err(error) = incoming.retry() {
                error.into_incoming().refuse();
            }
        }
    }
}

async fn receive(
    endpoint: Arc<EndpointInner>,
    incoming: Incoming,
    permit: OwnedSemaphorePermit,
    controls: mpsc::Sender<Control>,
) {
    let address = incoming.remote_address();
    let limit = endpoint.config.handshake_timeout;
    let handshake = async {
        let mut connecting = incoming.accept()?;
        let data = connecting.handshake_data().await?;
        let bulk = data
            .downcast::<HandshakeData>()
            .is_ok_and(|data| data.protocol.as_deref() == Some(ALPN_BULK));
        Ok::<_, ConnectionError>((connecting.await?, bulk))
    };
    let (connection, bulk) = match tokio::time::timeout(limit, handshake).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => return debug!(%address, %error, "handshake failed"),
        Err(_) => return debug!(%address, "handshake timed out"),
    };
    let link = Link::new(connection, address);
    keeper::watch(&link, bulk);
    let opening = async {
        let host = admit(&endpoint, &link)?;
        if bulk {
            open_bulk(&endpoint, &link, host).await
        } else {
            greet(&endpoint, &link, host, address, &controls).await
        }
    };
    let result = tokio::time::timeout(limit, opening).await;
    drop(permit);
    let result = result.unwrap_or_else(|_| {
        let reason = "the opening exchange did not come in time".to_owned();
        Err((CloseCode::BadOpening, reason))
    });
    if let Err((code, reason)) = result {
        // A dialler that needed only the handshake: another address was faster, or it asked for the
        // identity.
        if let Some(LinkError::ClosedByPeer { code, .. }) = link.lost()
            && code == CloseCode::Done
        {
            return debug!(%address, "closed before the opening exchange");
        }
        info!(%address, reason, "refused a connection");
        link.close(code, &reason);
    }
}

/// Looks the peer's proved key up in the trust store.
fn admit(endpoint: &Arc<EndpointInner>, link: &Link) -> Result<TrustedHost, Refusal> {
    let Some(id) = link.peer_id() else {
        return Err((CloseCode::IdentityUnknown, "no certificate".to_owned()));
    };
    let host = match endpoint.trust.by_id(id) {
        Ok(Some(host)) => host,
        Ok(None) => return Err((CloseCode::IdentityUnknown, unknown(endpoint, id))),
        Err(error) => {
            warn!(%error, "no host is trusted until the trust store is corrected");
            let reason = "the trust store here cannot be read".to_owned();
            return Err((CloseCode::IdentityUnknown, reason));
        }
    };
    if host.scope == Scope::default() {
        let reason = format!(
            "{id} is known here as `{}`, but may neither query nor send guests",
            host.name
        );
        return Err((CloseCode::NotAllowed, reason));
    }
    if !endpoint.register(id, link) {
        return Err((CloseCode::Busy, "too many connections".to_owned()));
    }
    Ok(host)
}

fn unknown(endpoint: &EndpointInner, id: HostId) -> String {
    format!(
        "identity unknown: {id} is not trusted here; on the host {}, compare this fingerprint \
         and run `longhaul host trust`",
        endpoint.identity.host_id()
    )
}

/// Performs the listener's side of the Hello.
async fn greet(
    endpoint: &Arc<EndpointInner>,
    link: &Link,
    host: TrustedHost,
    address: SocketAddr,
    controls: &mpsc::Sender<Control>,
) -> Result<(), Refusal> {
    let bad = |error: LinkError| (CloseCode::BadOpening, error.to_string());
    let streams = link.connection.accept_bi().await;
    let (mut send, mut receive) = streams.map_err(|error| bad(link.error(error)))?;
    let theirs = receive_hello(link, &mut receive).await.map_err(bad)?;
    let hello = &endpoint.config.hello;
    send_hello(link, &mut send, hello).await.map_err(bad)?;
    let version = match hello.agree(&theirs) {
        Ok(version) => version,
        Err(error) => {
            // The peer needs this side's Hello to report the same, so it closes first.
            let _ = tokio::time::timeout(INCOMPATIBLE_LINGER, link.closed()).await;
            return Err((CloseCode::Incompatible, error.to_string()));
        }
    };
    let connection = &link.connection;
    connection.set_receive_window(VarInt::from_u32(CONTROL_WINDOW_BYTES));
    // The stream of the Hello counts until its end is acknowledged.
    connection.set_max_concurrent_bi_streams(VarInt::from_u32(CHANNELS_MAX + 1));
    let control = endpoint.control(link.clone(), host, address, theirs, version, false);
    let sent = controls.send(control).await;
    sent.map_err(|_| (CloseCode::ShuttingDown, "the agent stops".to_owned()))
}

async fn open_bulk(
    endpoint: &Arc<EndpointInner>,
    link: &Link,
    host: TrustedHost,
) -> Result<(), Refusal> {
    let (opening, answer) = read_opening(link).await?;
    let lost = |error: crate::BulkError| (CloseCode::BadOpening, error.to_string());
    match opening.purpose {
        BulkPurpose::Migration => {
            let offers = &endpoint.bulk_offers;
            let offer = offers.redeem(&opening.token, host.id, &opening.binding);
            let Some(hand_over) = offer else {
                let reason = "the token is unknown, used, expired or for something else";
                return Err((CloseCode::BadToken, reason.to_owned()));
            };
            accept_opening(answer).await?;
            let receiver = BulkReceiver::start(link.clone(), &opening).await;
            // A failure means that the task with the offer has given up; dropping closes.
            let _ = hand_over.send(receiver.map_err(lost)?);
        }
        BulkPurpose::Probe => {
            if !host.scope.allows(Permission::Query) {
                let reason = format!("`{}` may not query here", host.name);
                return Err((CloseCode::NotAllowed, reason));
            }
            let Some(turn) = crate::probe::Turn::take(&endpoint.probed) else {
                let reason = "another measurement is under way".to_owned();
                return Err((CloseCode::Busy, reason));
            };
            accept_opening(answer).await?;
            let receiver = BulkReceiver::start(link.clone(), &opening).await;
            tokio::spawn(crate::probe::discard(receiver.map_err(lost)?, turn));
        }
    }
    Ok(())
}

async fn accept_opening(mut answer: SendStream) -> Result<(), Refusal> {
    let sent = answer.write_all(&crate::bulk::OPENING_ANSWER).await;
    sent.map_err(|error| (CloseCode::BadOpening, error.to_string()))?;
    // Fails only when the stream was finished before.
    let _ = answer.finish();
    Ok(())
}
