//! Dials the addresses of a host in parallel, each a little after the one before (RFC 8305).

#[cfg(test)]
mod tests;

use super::candidates::{Candidate, Candidates, Queue, Source, canonical};
use super::{CONTROL_WINDOW_BYTES, EndpointInner, common_transport};
use crate::control::CHANNELS_MAX;
use crate::error::{ConnectError, LinkError};
use crate::keeper::CONCURRENT_PATHS_MAX;
use crate::paths::PathTo;
use crate::quic::{self, Link, QuicClientConfig, TransportConfig, VarInt, header_bytes};
use crate::rate::{LimitedFactory, RateLimit};
use crate::tls::{self, ALPN_BULK, ALPN_CONTROL, ExpectedServer, SERVER_NAME};
use crate::trust::TRUSTED_HOSTS_MAX;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use longhaul_protocol::HostId;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tracing::debug;

/// The time from one attempt to the next while none has failed (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// How long the first attempt waits for the name service to answer for all names (RFC 8305,
/// section 3).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);

/// The target of a dial, and its parameters.
pub(crate) struct Dial {
    pub(crate) expected: Option<HostId>,
    pub(crate) name: String,
    pub(crate) alpn: &'static [u8],
    pub(crate) limit: RateLimit,
    /// The network paths that are used at once; none for one path at a time.
    pub(crate) paths: Vec<PathTo>,
}

impl Dial {
    /// Returns these addresses and those of the paths.
    pub(crate) fn addresses(&self, others: &[String]) -> Vec<String> {
        let paths = self.paths.iter().map(|path| canonical(path.to).to_string());
        others.iter().cloned().chain(paths).collect()
    }

    pub(crate) fn error(&self, error: LinkError) -> ConnectError {
        let name = self.name.clone();
        match error {
            LinkError::ClosedByPeer { code, reason } => {
                ConnectError::Refused { name, code, reason }
            }
            error => ConnectError::Lost { name, error },
        }
    }
}

impl EndpointInner {
    /// Dials the candidates until one answers with the expected identity, and closes the others. An
    /// address that fails, or answers with another identity, does not end the search; a refusal
    /// by the expected host does.
    pub(crate) async fn dial_any(
        &self,
        dial: &Dial,
        candidates: Candidates,
    ) -> Result<(Link, SocketAddr), ConnectError> {
        let worked = dial.expected.and_then(|id| self.worked().get(&id).copied());
        let race = Race {
            worked,
            resolve_within: self.config.handshake_timeout,
            is_final: |error: &ConnectError| matches!(error, ConnectError::Refused { .. }),
            attempt: |address| self.dial(dial, address),
        };
        match race.run(candidates).await {
            Ok((candidate, link)) => {
                let (address, source) = (candidate.address, candidate.source);
                debug!(host = dial.name, %address, origin = %source.origin, "answered");
                if let Some(id) = dial.expected {
                    self.note_worked(id, address);
                }
                Ok((link, address))
            }
            Err(Failures::Final(error)) => Err(error),
            Err(Failures::All(failures)) => Err(no_answer(dial, failures)),
        }
    }

    /// Dials one address.
    pub(crate) async fn dial(
        &self,
        dial: &Dial,
        address: SocketAddr,
    ) -> Result<Link, ConnectError> {
        let address = self.mapped(address);
        let setup = |text: String| dial.error(LinkError::Failed(text));
        let expected = ExpectedServer::new(dial.expected);
        let tls = tls::client(&self.identity, expected.clone(), dial.alpn);
        let tls = tls.map_err(|e| setup(e.to_string()))?;
        let tls = QuicClientConfig::try_from(tls).map_err(|e| setup(e.to_string()))?;
        let mut client = quic::ClientConfig::new(Arc::new(tls));
        let transport = self.client_transport(dial, address);
        client.transport_config(Arc::new(transport.map_err(setup)?));
        let connecting = self
            .quic
            .connect_with(client, address, SERVER_NAME)
            .map_err(|e| setup(e.to_string()))?;
        match tokio::time::timeout(self.config.handshake_timeout, connecting).await {
            Ok(Ok(connection)) => {
                let link = Link::new(connection, address);
                if let Some(id) = link.peer_id() {
                    self.register(id, &link);
                }
                Ok(link)
            }
            Ok(Err(error)) => match (dial.expected, expected.found()) {
                (Some(expected), Some(found)) if expected != found => {
                    Err(ConnectError::IdentityChanged {
                        name: dial.name.clone(),
                        expected,
                        found,
                        address: canonical(address).to_string(),
                    })
                }
                _ => Err(dial.error(error.into())),
            },
            Err(_) => Err(dial.error(LinkError::TimedOut)),
        }
    }

    /// Returns an IPv4 address in the form for a dual-stack socket.
    pub(super) fn mapped(&self, address: SocketAddr) -> SocketAddr {
        match (address, self.config.listen) {
            (SocketAddr::V4(v4), SocketAddr::V6(_)) => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            _ => address,
        }
    }

    /// Returns the dialler's transport configuration: the peer has proved the expected key.
    fn client_transport(
        &self,
        dial: &Dial,
        address: SocketAddr,
    ) -> Result<TransportConfig, String> {
        let is = |alpn: &[u8]| dial.alpn == alpn;
        let channels = if is(ALPN_CONTROL) { CHANNELS_MAX } else { 0 };
        let mut transport = common_transport(&self.config)?;
        transport
            .receive_window(VarInt::from_u32(CONTROL_WINDOW_BYTES))
            .max_concurrent_bidi_streams(VarInt::from_u32(channels))
            .max_concurrent_uni_streams(VarInt::from_u32(u32::from(is(ALPN_BULK))))
            .congestion_controller_factory(Arc::new(LimitedFactory {
                limit: dial.limit.clone(),
                header_bytes: header_bytes(address),
            }));
        if !dial.paths.is_empty() {
            transport.max_concurrent_multipath_paths(CONCURRENT_PATHS_MAX);
        }
        Ok(transport)
    }

    fn worked(&self) -> std::sync::MutexGuard<'_, super::Worked> {
        self.worked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_worked(&self, id: HostId, address: SocketAddr) {
        let mut worked = self.worked();
        // Identities that were replaced stay; the rest is learnt again.
        if worked.len() >= TRUSTED_HOSTS_MAX && !worked.contains_key(&id) {
            worked.clear();
        }
        worked.insert(id, address);
    }
}

/// Returns the error for a host none of whose addresses works.
fn no_answer(dial: &Dial, failures: Vec<(String, Failure<ConnectError>)>) -> ConnectError {
    let name = dial.name.clone();
    if let Some(error) = identity_changed(&failures) {
        return error;
    }
    let tried = failures.into_iter().map(|(address, failure)| {
        let why = match failure {
            Failure::Attempt(ConnectError::Lost { error, .. }) => error.to_string(),
            Failure::Attempt(ConnectError::IdentityChanged { found, .. }) => {
                format!("a host with another identity answers, {found}")
            }
            Failure::Attempt(error) => error.to_string(),
            Failure::Other(text) => text,
        };
        (address, why)
    });
    let tried = tried.collect();
    ConnectError::Unreachable { name, tried }
}

/// Returns the error if one other identity, and nothing else, answers at every address.
fn identity_changed(failures: &[(String, Failure<ConnectError>)]) -> Option<ConnectError> {
    let mut changed: Option<ConnectError> = None;
    for (_, failure) in failures {
        let Failure::Attempt(error @ ConnectError::IdentityChanged { found, address, .. }) =
            failure
        else {
            return None;
        };
        match &mut changed {
            None => changed = Some(error.clone()),
            Some(ConnectError::IdentityChanged {
                found: first,
                address: addresses,
                ..
            }) if first == found => {
                addresses.push(' ');
                addresses.push_str(address);
            }
            Some(_) => return None,
        }
    }
    changed
}

/// The dialling of candidates in parallel.
struct Race<IsFinal, Attempt> {
    /// The address that is tried first.
    worked: Option<SocketAddr>,
    /// The time limit of the name service.
    resolve_within: Duration,
    /// Returns whether an error of an attempt ends the race.
    is_final: IsFinal,
    /// Dials an address. Dropping the future closes what it has begun.
    attempt: Attempt,
}

/// Why no candidate won.
enum Failures<E> {
    /// An error that holds for all.
    Final(E),
    /// The error of each address.
    All(Vec<(String, Failure<E>)>),
}

/// Why an address did not work.
enum Failure<E> {
    /// The attempt failed.
    Attempt(E),
    /// There was no attempt.
    Other(String),
}

impl<E, T, F, IsFinal, Attempt> Race<IsFinal, Attempt>
where
    IsFinal: Fn(&E) -> bool,
    Attempt: Fn(SocketAddr) -> F,
    F: Future<Output = Result<T, E>>,
{
    /// Returns the first success. The next attempt starts 250 ms after the one before, or when one
    /// fails.
    async fn run(self, candidates: Candidates) -> Result<(Candidate, T), Failures<E>> {
        let mut queue = Queue::new(self.worked);
        let mut failures = Vec::new();
        let mut resolving = FuturesUnordered::new();
        for (place, source) in candidates.into_sources() {
            match source.literal() {
                Some(address) => add(&mut queue, &mut failures, place, &source, &[address]),
                None => resolving.push(self.resolve(place, source)),
            }
        }
        let mut attempts = FuturesUnordered::new();
        let timer = tokio::time::sleep(RESOLUTION_DELAY);
        tokio::pin!(timer);
        let mut started = false;
        // Whether the next attempt may start.
        let mut due = false;
        loop {
            let ready = due || (!started && resolving.is_empty());
            if ready && let Some(candidate) = queue.next() {
                (started, due) = (true, false);
                timer.as_mut().reset(Instant::now() + ATTEMPT_DELAY);
                let attempt = (self.attempt)(candidate.address);
                attempts.push(async move { (candidate, attempt.await) });
            }
            if attempts.is_empty() && resolving.is_empty() && queue.is_empty() {
                return Err(Failures::All(failures));
            }
            tokio::select! {
                biased;
                Some((candidate, result)) = attempts.next() => match result {
                    Ok(winner) => return Ok((candidate, winner)),
                    Err(error) if (self.is_final)(&error) => return Err(Failures::Final(error)),
                    Err(error) => {
                        failures.push((shown(&candidate), Failure::Attempt(error)));
                        due = true;
                    }
                },
                Some((place, source, resolved)) = resolving.next() => match resolved {
                    Ok(resolved) => add(&mut queue, &mut failures, place, &source, &resolved),
                    Err(text) => failures.push((source.address, Failure::Other(text))),
                },
                () = &mut timer, if !due => due = true,
            }
        }
    }

    async fn resolve(
        &self,
        place: usize,
        source: Source,
    ) -> (usize, Source, Result<Vec<SocketAddr>, String>) {
        let resolved = tokio::time::timeout(self.resolve_within, source.resolve()).await;
        let resolved = match resolved {
            Ok(Ok(resolved)) if resolved.is_empty() => Err("the name has no address".to_owned()),
            Ok(Ok(resolved)) => Ok(resolved),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the name service did not answer in time".to_owned()),
        };
        (place, source, resolved)
    }
}

fn add<E>(
    queue: &mut Queue,
    failures: &mut Vec<(String, Failure<E>)>,
    place: usize,
    source: &Source,
    resolved: &[SocketAddr],
) {
    let left_out = queue.add(place, source, resolved);
    if left_out > 0 {
        let text = format!("{left_out} addresses are not tried, there are too many");
        failures.push((source.address.clone(), Failure::Other(text)));
    }
}

/// Returns the candidate as errors name it.
fn shown(candidate: &Candidate) -> String {
    let Candidate {
        source, address, ..
    } = candidate;
    match source.literal() {
        Some(_) => source.address.clone(),
        None => format!("{} ({address})", source.address),
    }
}
