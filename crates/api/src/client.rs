//! Implements the client of the API: one connection per request, with limits on sizes and times.

use crate::device_stream::{DEVICE_PROTOCOL, DeviceStream};
use crate::operation::{Method, Operation};
use crate::{
    ANSWER_BYTES_MAX, ApiError, AttachGuest, DiscoveredGuests, EVENT_LINE_BYTES_MAX, Event,
    FailOver, FailedOver, Guest, Guests, Host, JoinRealm, Limit, Migration, Migrations, Plan,
    PlanRequest, Probe, ProbeResult, Progress, RealmStatus, ReclaimGuest, Replicas, ReplicateGuest,
    Replication, Replications, Report, Resolve, StartGuest, StartMigration, StopGuest,
    TrackedWrites, Trust, TrustedHost, TrustedHosts, WATCH_LINE_BYTES_MAX, What,
};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// Time limit for answers from the agent's memory or disk.
const ANSWER_WAIT: Duration = Duration::from_secs(15);
/// Time limit for answers that involve QEMU or another host.
const WORK_WAIT: Duration = Duration::from_secs(180);
/// Time limit between two lines of a stream. An agent sends one at least every second.
const WATCH_WAIT: Duration = Duration::from_secs(20);
/// Time limit for answers for which disks are copied.
const COPY_WAIT: Duration = Duration::from_secs(24 * 3600);

/// The reason of a failed request.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No agent answers at the endpoint.
    #[error("agent unreachable at {endpoint}: {source}")]
    Unreachable {
        /// The expected endpoint of the agent.
        endpoint: String,
        /// The error of the connection.
        source: io::Error,
    },
    /// The agent accepts the connection and sends no answer.
    #[error("the agent at {endpoint} did not answer within {wait_s} s")]
    Silent {
        /// The endpoint of the agent.
        endpoint: String,
        /// The time limit, in seconds.
        wait_s: u64,
    },
    /// The answer does not conform to this API.
    #[error("the agent at {endpoint} gave an answer that makes no sense: {what}")]
    Nonsense {
        /// The endpoint of the agent.
        endpoint: String,
        /// The error in it.
        what: String,
    },
    /// The connection ended before the answer did.
    #[error("the agent at {endpoint} went away: {what}")]
    Lost {
        /// The endpoint of the agent.
        endpoint: String,
        /// The error.
        what: String,
    },
    /// The agent answered with an error.
    #[error(transparent)]
    Api(#[from] ApiError),
}

impl ClientError {
    /// Returns a remedy for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Unreachable { endpoint, source } => Some(match source.kind() {
                io::ErrorKind::PermissionDenied => format!(
                    "{endpoint} belongs to the user that the agent runs as: use sudo, or \
                     --socket for another agent"
                ),
                io::ErrorKind::InvalidData => {
                    "compare the fingerprint with what `longhaul host` shows on that host"
                        .to_owned()
                }
                _ => "is it running? systemctl status longhaul-agent (--socket, or \
                      LONGHAUL_SOCKET, for an agent elsewhere)"
                    .to_owned(),
            }),
            Self::Silent { .. } | Self::Lost { .. } => {
                Some("its log says more: journalctl -u longhaul-agent".to_owned())
            }
            Self::Nonsense { .. } => {
                Some("are command and agent of the same version? longhaul --version".to_owned())
            }
            Self::Api(error) => error.hint.clone(),
        }
    }

    /// Returns the exit code of a command that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Api(error) => error.code.exit_code(),
            _ => 5,
        }
    }
}

/// The endpoint of an agent.
#[derive(Clone)]
enum Endpoint {
    Unix(PathBuf),
    Tls {
        address: String,
        config: Arc<rustls::ClientConfig>,
        token: String,
    },
}

/// A client of one agent.
#[derive(Clone)]
pub struct Client {
    endpoint: Endpoint,
}

impl Client {
    /// Creates a client of an agent on this host, by its unix socket.
    pub fn unix(path: impl AsRef<Path>) -> Self {
        Self {
            endpoint: Endpoint::Unix(path.as_ref().to_owned()),
        }
    }

    /// Creates a client of an agent at `host:port`, over TLS. `config` decides which keys are
    /// accepted.
    pub fn tls(address: &str, config: Arc<rustls::ClientConfig>, token: &str) -> Self {
        Self {
            endpoint: Endpoint::Tls {
                address: address.to_owned(),
                config,
                token: token.to_owned(),
            },
        }
    }

    /// Returns the agent's host.
    pub async fn host(&self) -> Result<Host, ClientError> {
        self.get(Operation::GetHost, "").await
    }

    /// Returns the trusted hosts.
    pub async fn hosts(&self) -> Result<TrustedHosts, ClientError> {
        self.get(Operation::ListHosts, "").await
    }

    /// Trusts a host.
    pub async fn trust(&self, trust: &Trust) -> Result<TrustedHost, ClientError> {
        self.send(Operation::TrustHost, "", trust, ANSWER_WAIT)
            .await
    }

    /// Removes the trust in a host.
    pub async fn forget(&self, host: &str) -> Result<(), ClientError> {
        let request = self.request(Operation::ForgetHost, host, Bytes::new())?;
        timeout(ANSWER_WAIT, self.exchange(request))
            .await
            .map_err(|_| self.silent(ANSWER_WAIT))?
            .map(|_| ())
    }

    /// Measures the link to a trusted host.
    pub async fn probe(&self, host: &str, probe: &Probe) -> Result<ProbeResult, ClientError> {
        self.send(Operation::ProbeHost, host, probe, WORK_WAIT)
            .await
    }

    /// Returns the realm of the agent's host.
    pub async fn realm(&self) -> Result<RealmStatus, ClientError> {
        self.get(Operation::GetRealm, "").await
    }

    /// Joins a realm.
    pub async fn join_realm(&self, join: &JoinRealm) -> Result<RealmStatus, ClientError> {
        self.send(Operation::JoinRealm, "", join, WORK_WAIT).await
    }

    /// Forgets the realm.
    pub async fn leave_realm(&self) -> Result<(), ClientError> {
        let request = self.request(Operation::LeaveRealm, "", Bytes::new())?;
        timeout(ANSWER_WAIT, self.exchange(request))
            .await
            .map_err(|_| self.silent(ANSWER_WAIT))?
            .map(|_| ())
    }

    /// Returns the guests of the agent's host.
    pub async fn guests(&self) -> Result<Guests, ClientError> {
        self.get(Operation::ListGuests, "").await
    }

    /// Returns one guest.
    pub async fn guest(&self, guest: &str) -> Result<Guest, ClientError> {
        self.get(Operation::GetGuest, guest).await
    }

    /// Starts a guest.
    pub async fn start_guest(&self, start: &StartGuest) -> Result<Guest, ClientError> {
        self.send(Operation::StartGuest, "", start, WORK_WAIT).await
    }

    /// Stops a guest.
    pub async fn stop_guest(&self, guest: &str, stop: &StopGuest) -> Result<Guest, ClientError> {
        self.send(Operation::StopGuest, guest, stop, WORK_WAIT)
            .await
    }

    /// Resumes a guest that a move has left paused.
    pub async fn resume_guest(&self, guest: &str) -> Result<Guest, ClientError> {
        self.send(Operation::ResumeGuest, guest, &(), WORK_WAIT)
            .await
    }

    /// Reclaims the right to run a guest from a host that never returns.
    pub async fn reclaim_guest(
        &self,
        guest: &str,
        reclaim: &ReclaimGuest,
    ) -> Result<Guest, ClientError> {
        self.send(Operation::ReclaimGuest, guest, reclaim, WORK_WAIT)
            .await
    }

    /// Attaches a guest that another program started.
    pub async fn attach_guest(
        &self,
        guest: &str,
        attach: &AttachGuest,
    ) -> Result<Guest, ClientError> {
        self.send(Operation::AttachGuest, guest, attach, WORK_WAIT)
            .await
    }

    /// Detaches an attached guest.
    pub async fn detach_guest(&self, guest: &str) -> Result<(), ClientError> {
        let request = self.request(Operation::DetachGuest, guest, Bytes::new())?;
        timeout(ANSWER_WAIT, self.exchange(request))
            .await
            .map_err(|_| self.silent(ANSWER_WAIT))?
            .map(|_| ())
    }

    /// Returns the QEMU processes of the agent's host.
    pub async fn discover_guests(&self) -> Result<DiscoveredGuests, ClientError> {
        let request = self.request(Operation::DiscoverGuests, "", Bytes::new())?;
        self.answer(request, WORK_WAIT).await
    }

    /// Begins to track a guest's writes to its local disks.
    pub async fn track_writes(&self, guest: &str) -> Result<TrackedWrites, ClientError> {
        self.send(Operation::TrackWrites, guest, &(), WORK_WAIT)
            .await
    }

    /// Returns the tracked writes of a guest.
    pub async fn tracked_writes(&self, guest: &str) -> Result<TrackedWrites, ClientError> {
        self.get(Operation::GetTrackedWrites, guest).await
    }

    /// Ends the tracking of a guest's writes, and forgets them.
    pub async fn stop_tracking(&self, guest: &str) -> Result<(), ClientError> {
        let request = self.request(Operation::StopTrackingWrites, guest, Bytes::new())?;
        timeout(WORK_WAIT, self.exchange(request))
            .await
            .map_err(|_| self.silent(WORK_WAIT))?
            .map(|_| ())
    }

    /// Begins to replicate a guest to another host, or changes how.
    pub async fn replicate(
        &self,
        guest: &str,
        how: &ReplicateGuest,
    ) -> Result<Replication, ClientError> {
        self.send(Operation::ReplicateGuest, guest, how, WORK_WAIT)
            .await
    }

    /// Returns the replications of the guests.
    pub async fn replications(&self) -> Result<Replications, ClientError> {
        self.get(Operation::ListReplications, "").await
    }

    /// Ends the replication of a guest.
    pub async fn stop_replication(&self, guest: &str) -> Result<(), ClientError> {
        let request = self.request(Operation::StopReplication, guest, Bytes::new())?;
        timeout(WORK_WAIT, self.exchange(request))
            .await
            .map_err(|_| self.silent(WORK_WAIT))?
            .map(|_| ())
    }

    /// Returns the replicas that the host keeps.
    pub async fn replicas(&self) -> Result<Replicas, ClientError> {
        self.get(Operation::ListReplicas, "").await
    }

    /// Removes a replica with all its versions.
    pub async fn remove_replica(&self, guest: &str) -> Result<(), ClientError> {
        let request = self.request(Operation::RemoveReplica, guest, Bytes::new())?;
        timeout(WORK_WAIT, self.exchange(request))
            .await
            .map_err(|_| self.silent(WORK_WAIT))?
            .map(|_| ())
    }

    /// Lets a guest run from its replica. An earlier version is copied first, which takes its time.
    pub async fn fail_over(&self, guest: &str, how: &FailOver) -> Result<FailedOver, ClientError> {
        self.send(Operation::FailOver, guest, how, COPY_WAIT).await
    }

    /// Opens a channel to a device of a parcel that is attached to another host.
    pub async fn parcel_device(&self, host: &str) -> Result<DeviceStream, ClientError> {
        let mut request = self.request(Operation::UseParcelDevice, host, Bytes::new())?;
        let headers = request.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static(DEVICE_PROTOCOL));
        timeout(WORK_WAIT, async {
            let answer = self.open(request).await?;
            if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
                self.body(answer).await?;
                return Err(self.nonsense("another protocol was asked for"));
            }
            let upgraded = hyper::upgrade::on(answer).await;
            let upgraded = upgraded.map_err(|error| self.lost(error))?;
            Ok(DeviceStream::of(TokioIo::new(upgraded)))
        })
        .await
        .map_err(|_| self.silent(WORK_WAIT))?
    }

    /// Checks and predicts a migration without changing anything.
    pub async fn plan(&self, plan: &PlanRequest) -> Result<Plan, ClientError> {
        self.send(Operation::PlanMigration, "", plan, WORK_WAIT)
            .await
    }

    /// Starts a migration.
    pub async fn migrate(&self, start: &StartMigration) -> Result<Migration, ClientError> {
        self.send(Operation::StartMigration, "", start, WORK_WAIT)
            .await
    }

    /// Returns the migrations, the newest first.
    pub async fn migrations(&self) -> Result<Migrations, ClientError> {
        self.get(Operation::ListMigrations, "").await
    }

    /// Returns one migration, by its id or an unambiguous prefix of it.
    pub async fn migration(&self, id: &str) -> Result<Migration, ClientError> {
        self.get(Operation::GetMigration, id).await
    }

    /// Cancels a migration. The guest stays at the source.
    pub async fn cancel(&self, id: &str) -> Result<Migration, ClientError> {
        self.send(Operation::CancelMigration, id, &(), WORK_WAIT)
            .await
    }

    /// Resolves a migration whose agents cannot connect: decides which side runs the guest.
    pub async fn resolve(&self, id: &str, resolve: &Resolve) -> Result<Migration, ClientError> {
        self.send(Operation::ResolveMigration, id, resolve, WORK_WAIT)
            .await
    }

    /// Changes a migration's rate limit.
    pub async fn limit(&self, id: &str, limit: &Limit) -> Result<Migration, ClientError> {
        self.send(Operation::LimitMigration, id, limit, WORK_WAIT)
            .await
    }

    /// Returns a migration's report.
    pub async fn report(&self, id: &str) -> Result<Report, ClientError> {
        self.get(Operation::ReportMigration, id).await
    }

    /// Watches a migration.
    pub async fn watch(&self, id: &str) -> Result<Watch, ClientError> {
        let request = self.request(Operation::WatchMigration, id, Bytes::new())?;
        let lines = self.lines(request, "the migration", WATCH_LINE_BYTES_MAX);
        Ok(Watch {
            lines: lines.await?,
            ended: false,
        })
    }

    /// Watches the migrations and reserved guests of the agent's host.
    pub async fn events(&self) -> Result<Events, ClientError> {
        let request = self.request(Operation::WatchEvents, "", Bytes::new())?;
        let lines = self.lines(request, "events", EVENT_LINE_BYTES_MAX);
        Ok(Events {
            lines: lines.await?,
            ended: false,
        })
    }

    async fn lines(
        &self,
        request: Request<Full<Bytes>>,
        content: &'static str,
        line_bytes_max: usize,
    ) -> Result<Lines, ClientError> {
        let answer = timeout(ANSWER_WAIT, self.open(request))
            .await
            .map_err(|_| self.silent(ANSWER_WAIT))??;
        let body = if answer.status().is_success() {
            answer.into_body()
        } else {
            self.body(answer).await?;
            return Err(self.nonsense("an error without content"));
        };
        Ok(Lines {
            client: self.clone(),
            body,
            buffer: Vec::new(),
            content,
            line_bytes_max,
        })
    }

    /// Returns the OpenAPI description that the agent serves.
    pub async fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.get(Operation::GetOpenapi, "").await
    }

    async fn get<T: DeserializeOwned>(
        &self,
        operation: Operation,
        value: &str,
    ) -> Result<T, ClientError> {
        let request = self.request(operation, value, Bytes::new())?;
        self.answer(request, ANSWER_WAIT).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        operation: Operation,
        value: &str,
        content: &impl Serialize,
        wait: Duration,
    ) -> Result<T, ClientError> {
        let content = serde_json::to_vec(content).map_err(|error| self.nonsense(error))?;
        // `()` stands for an empty body.
        let content = if content == b"null" {
            Bytes::new()
        } else {
            Bytes::from(content)
        };
        self.answer(self.request(operation, value, content)?, wait)
            .await
    }

    async fn answer<T: DeserializeOwned>(
        &self,
        request: Request<Full<Bytes>>,
        wait: Duration,
    ) -> Result<T, ClientError> {
        let content = timeout(wait, self.exchange(request))
            .await
            .map_err(|_| self.silent(wait))??;
        serde_json::from_slice(&content).map_err(|error| self.nonsense(error))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Bytes, ClientError> {
        let answer = self.open(request).await?;
        self.body(answer).await
    }

    fn request(
        &self,
        operation: Operation,
        value: &str,
        content: Bytes,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let method = match operation.method() {
            Method::Get => hyper::Method::GET,
            Method::Post => hyper::Method::POST,
            Method::Put => hyper::Method::PUT,
            Method::Delete => hyper::Method::DELETE,
        };
        let mut request = Request::builder()
            .method(method)
            .uri(operation.path_with(value))
            .header("accept", "application/json, application/x-ndjson");
        if !content.is_empty() {
            request = request.header("content-type", "application/json");
        }
        match &self.endpoint {
            Endpoint::Unix(_) => request = request.header("host", "agent"),
            Endpoint::Tls { address, token, .. } => {
                request = request
                    .header("host", address)
                    .header("authorization", format!("Bearer {token}"));
            }
        }
        request
            .body(Full::new(content))
            .map_err(|error| self.nonsense(error))
    }

    async fn open(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, ClientError> {
        let connect = async {
            match &self.endpoint {
                Endpoint::Unix(path) => {
                    let stream = UnixStream::connect(path).await;
                    stream.map(|stream| Box::new(stream) as Box<dyn Stream>)
                }
                Endpoint::Tls {
                    address, config, ..
                } => connect_tls(address, config).await,
            }
        };
        let stream = timeout(CONNECT_WAIT, connect)
            .await
            .map_err(|_| io::ErrorKind::TimedOut.into())
            .and_then(|result| result)
            .map_err(|source| ClientError::Unreachable {
                endpoint: self.endpoint(),
                source,
            })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.lost(error))?;
        // The task ends with the last byte of the answer, or when the receiver is dropped.
        tokio::spawn(connection.with_upgrades());
        sender
            .send_request(request)
            .await
            .map_err(|error| self.lost(error))
    }

    async fn body(&self, answer: Response<Incoming>) -> Result<Bytes, ClientError> {
        let status = answer.status();
        let content = Limited::new(answer.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| {
                if error.is::<LengthLimitError>() {
                    self.nonsense("it is too long")
                } else {
                    self.lost(error)
                }
            })?
            .to_bytes();
        if status.is_success() {
            return Ok(content);
        }
        Err(match serde_json::from_slice::<ApiError>(&content) {
            Ok(error) => ClientError::Api(error),
            Err(_) => self.nonsense(format!("status {status}")),
        })
    }

    fn endpoint(&self) -> String {
        match &self.endpoint {
            Endpoint::Unix(path) => path.display().to_string(),
            Endpoint::Tls { address, .. } => address.clone(),
        }
    }

    fn silent(&self, wait: Duration) -> ClientError {
        ClientError::Silent {
            endpoint: self.endpoint(),
            wait_s: wait.as_secs(),
        }
    }

    fn nonsense(&self, what: impl ToString) -> ClientError {
        ClientError::Nonsense {
            endpoint: self.endpoint(),
            what: what.to_string(),
        }
    }

    fn lost(&self, what: impl ToString) -> ClientError {
        ClientError::Lost {
            endpoint: self.endpoint(),
            what: what.to_string(),
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn connect_tls(
    address: &str,
    config: &Arc<rustls::ClientConfig>,
) -> io::Result<Box<dyn Stream>> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
    let (host, _) = address
        .rsplit_once(':')
        .ok_or_else(|| invalid("it is not host:port"))?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = rustls::pki_types::ServerName::try_from(host.to_owned())
        .map_err(|_| invalid("its host is neither a name nor an address"))?;
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let connector = tokio_rustls::TlsConnector::from(config.clone());
    Ok(Box::new(connector.connect(name, stream).await?))
}

/// A watched migration.
pub struct Watch {
    lines: Lines,
    ended: bool,
}

impl Watch {
    /// Returns the next progress, or `None` after the last one, which has an outcome. Safe to
    /// cancel.
    pub async fn next(&mut self) -> Option<Result<Progress, ClientError>> {
        if self.ended {
            return None;
        }
        let progress = self.lines.next::<Progress>().await;
        self.ended = match &progress {
            Ok(progress) => progress.outcome.is_some(),
            Err(_) => true,
        };
        Some(progress)
    }
}

/// The events of a host.
pub struct Events {
    lines: Lines,
    ended: bool,
}

impl Events {
    /// Returns the next event that this version knows, or `None` after an error. A stream of events
    /// has no other end: when the agent stops, that is an error. Safe to cancel.
    pub async fn next(&mut self) -> Option<Result<Event, ClientError>> {
        while !self.ended {
            let event = self.lines.next::<Event>().await;
            self.ended = event.is_err();
            if !matches!(&event, Ok(event) if event.what == What::Unknown) {
                return Some(event);
            }
        }
        None
    }
}

/// An answer that is a stream of lines.
struct Lines {
    client: Client,
    body: Incoming,
    buffer: Vec<u8>,
    /// What the lines are about, for errors.
    content: &'static str,
    line_bytes_max: usize,
}

impl Lines {
    async fn next<T: DeserializeOwned>(&mut self) -> Result<T, ClientError> {
        let line = self.line().await?;
        serde_json::from_slice(&line).map_err(|error| self.client.nonsense(error))
    }

    async fn line(&mut self) -> Result<Vec<u8>, ClientError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                return Ok(line);
            }
            if self.buffer.len() > self.line_bytes_max {
                return Err(self.client.nonsense("a line is too long"));
            }
            let frame = timeout(WATCH_WAIT, self.body.frame())
                .await
                .map_err(|_| self.client.silent(WATCH_WAIT))?
                .ok_or_else(|| {
                    let what = format!("it stopped telling of {}", self.content);
                    self.client.lost(what)
                })?
                .map_err(|error| self.client.lost(error))?;
            if let Ok(data) = frame.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}
