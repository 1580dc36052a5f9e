//! Answers Binding requests, without state but the limits.

use super::limits::Limits;
use super::{BindingAnswer, BindingError, BindingRequest, STUN_BYTES_MAX, UNKNOWN_ATTRIBUTE};
use crate::quic::{Transmit, UdpSender};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Instant;
use tokio::net::UdpSocket;

/// Returns the answer to a datagram from this address; `None` if it is not a well-formed Binding
/// request. The answer has at most [`STUN_ANSWER_BYTES_MAX`](crate::STUN_ANSWER_BYTES_MAX) bytes.
pub fn binding_answer(datagram: &[u8], from: SocketAddr) -> Option<Vec<u8>> {
    let request = BindingRequest::decode(datagram).ok()?;
    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
    let answer = BindingAnswer {
        transaction: request.transaction,
        fingerprint: request.fingerprint,
        result: match request.unknown.is_empty() {
            true => Ok(from),
            false => Err(BindingError {
                code: UNKNOWN_ATTRIBUTE,
                unknown: request.unknown,
            }),
        },
    };
    Some(answer.encode())
}

/// Answers Binding requests on a socket of its own, under the limits of an agent's. Ends when the
/// socket fails.
pub async fn serve_stun(socket: &UdpSocket) -> io::Error {
    let mut limits = Limits::default();
    let mut buffer = [0; STUN_BYTES_MAX];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            // What an earlier answer caused.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => return error,
        };
        if let Some(answer) = binding_answer(&buffer[..length], from)
            && limits.allow(from.ip(), Instant::now())
        {
            // With a full socket buffer the answer is lost; the client asks again.
            let _ = socket.try_send_to(&answer, from);
        }
    }
}

#[derive(Debug)]
pub(crate) struct Server {
    sender: Pin<Box<dyn UdpSender>>,
    limits: Limits,
}

impl Server {
    pub(crate) fn new(sender: Pin<Box<dyn UdpSender>>) -> Self {
        let limits = Limits::default();
        Self { sender, limits }
    }

    /// Answers a request from `from` to this host's address `to`; returns whether it did.
    pub(crate) fn answer(&mut self, datagram: &[u8], from: SocketAddr, to: Option<IpAddr>) -> bool {
        let Some(answer) = binding_answer(datagram, from) else {
            return false;
        };
        if !self.limits.allow(from.ip(), Instant::now()) {
            return false;
        }
        let transmit = Transmit {
            destination: from,
            ecn: None,
            contents: &answer,
            segment_size: None,
            src_ip: to,
        };
        // With a full socket buffer the answer is lost; the client asks again.
        let mut context = Context::from_waker(Waker::noop());
        self.sender
            .as_mut()
            .poll_send(&transmit, &mut context)
            .is_ready()
    }
}
