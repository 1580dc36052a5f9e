//! Owns the sockets of the REST API: a unix socket for this host's administrator, and TCP with TLS
//! and a token where that is configured.

use crate::agent::connections::{CONNECTIONS_MAX, Connections, Seat};
use crate::agent::http::error_response;
use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_migration::host::config::TcpConfig;
use longhaul_migration::host::start_error::StartError;
use nix::sys::stat::{Mode, umask};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// The time limit for a request's head, and for TLS's handshake.
const HEAD_WAIT: Duration = Duration::from_secs(10);
/// The time limit for pending requests when the agent stops.
const GOODBYE_WAIT: Duration = Duration::from_secs(3);
/// The delay of the answer to a wrong token.
const WRONG_TOKEN_PAUSE: Duration = Duration::from_millis(200);
const TOKEN_FILE_BYTES_MAX: u64 = 4096;

/// The unix socket, removed on drop.
pub(crate) struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    room: Arc<Semaphore>,
}

impl UnixSocket {
    /// Opens it with mode 0600. The socket of a dead agent is replaced; a living agent's is not.
    pub(crate) async fn open(path: &Path) -> Result<Self, StartError> {
        let error = |what: &dyn std::fmt::Display| {
            StartError::new(format!("cannot open the socket {}: {what}", path.display()))
        };
        if UnixStream::connect(path).await.is_ok() {
            return Err(error(&"another agent answers there")
                .hint("two agents on one host need an `api.socket` of their own"));
        }
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|other| error(&other))?;
        }
        match std::fs::symlink_metadata(path) {
            Ok(found) if std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
                std::fs::remove_file(path).map_err(|other| error(&other))?;
            }
            Ok(_) => return Err(error(&"something else than a socket is there")),
            Err(_) => {}
        }
        let before = umask(Mode::from_bits_truncate(0o177));
        let bound = UnixListener::bind(path);
        umask(before);
        Ok(Self {
            listener: bound.map_err(|other| error(&other))?,
            path: path.to_owned(),
            room: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        })
    }

    /// Serves until asked to stop, then lets requests end.
    pub(crate) async fn serve(self, router: Router, stop: watch::Receiver<bool>) {
        serve(&self, router, stop).await;
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket was not removed");
        }
    }
}

/// The TCP socket.
pub(crate) struct TcpSocket {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    token: blake3::Hash,
    connections: Arc<Connections>,
}

impl TcpSocket {
    /// Opens it.
    pub(crate) async fn open(
        config: &TcpConfig,
        tls: rustls::ServerConfig,
    ) -> Result<Self, StartError> {
        let token = read_token(&config.token_file)?;
        let listener = TcpListener::bind(config.listen).await.map_err(|error| {
            StartError::new(format!("cannot listen on {}: {error}", config.listen))
        })?;
        Ok(Self {
            listener,
            acceptor: TlsAcceptor::from(Arc::new(tls)),
            token,
            connections: Connections::new(),
        })
    }

    /// Serves until asked to stop, then lets requests end.
    pub(crate) async fn serve(self, router: Router, stop: watch::Receiver<bool>) {
        let token = self.token;
        let router = router.layer(middleware::from_fn(move |request: Request, next: Next| {
            authorized(token, request, next)
        }));
        serve(&self, router, stop).await;
    }
}

async fn authorized(token: blake3::Hash, request: Request, next: Next) -> Response {
    let given = request
        .headers()
        .get("authorization")
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "));
    // Hashes are compared in constant time.
    if given.is_some_and(|given| blake3::hash(given.as_bytes()) == token) {
        if let Some(seat) = request.extensions().get::<Arc<Seat>>() {
            seat.token_shown();
        }
        return next.run(request).await;
    }
    sleep(WRONG_TOKEN_PAUSE).await;
    let error = ApiError::new(ErrorCode::Unauthorized, "the token is missing or wrong")
        .hint("the agent's configuration names the file that holds it: `api.tcp.token_file`");
    error_response(&error)
}

fn read_token(path: &Path) -> Result<blake3::Hash, StartError> {
    let error = |what: &dyn std::fmt::Display| {
        StartError::new(format!(
            "cannot use the token file {}: {what}",
            path.display()
        ))
        .hint("make one: (umask 077; openssl rand -hex 32 >FILE)")
    };
    let metadata = std::fs::metadata(path).map_err(|other| error(&other))?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions());
    if mode & 0o077 != 0 {
        return Err(error(&"others than its owner may read it"));
    }
    if metadata.len() > TOKEN_FILE_BYTES_MAX {
        return Err(error(&"it is too large"));
    }
    let text = std::fs::read_to_string(path).map_err(|other| error(&other))?;
    let token = text.trim();
    if !(32..=512).contains(&token.len()) || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(error(&"a token has 32 to 512 printable characters"));
    }
    Ok(blake3::hash(token.as_bytes()))
}

/// A connection's share of its socket's room.
enum Room {
    /// Of the host's administrator: nobody else reaches the socket.
    Own(#[expect(dead_code, reason = "held until the connection ends")] OwnedSemaphorePermit),
    /// Of a client that must show the token.
    Shared(Arc<Seat>),
}

/// A socket that accepts connections.
trait Accept: Sync {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Returns the next connection, before its handshake.
    fn accept(
        &self,
    ) -> impl Future<
        Output = io::Result<(
            Room,
            impl Future<Output = io::Result<Self::Stream>> + Send + 'static,
        )>,
    > + Send;
}

impl Accept for UnixSocket {
    type Stream = UnixStream;

    async fn accept(
        &self,
    ) -> io::Result<(
        Room,
        impl Future<Output = io::Result<UnixStream>> + Send + 'static,
    )> {
        let room = self.room.clone().acquire_owned().await;
        let room = room.map_err(io::Error::other)?;
        let (stream, _) = self.listener.accept().await?;
        Ok((Room::Own(room), async move { Ok(stream) }))
    }
}

impl Accept for TcpSocket {
    type Stream = TlsStream<TcpStream>;

    async fn accept(
        &self,
    ) -> io::Result<(
        Room,
        impl Future<Output = io::Result<Self::Stream>> + Send + 'static,
    )> {
        let (stream, from) = self.listener.accept().await?;
        let seat = Arc::new(self.connections.enter(from.ip()));
        let acceptor = self.acceptor.clone();
        Ok((
            Room::Shared(seat),
            async move { acceptor.accept(stream).await },
        ))
    }
}

/// Accepts connections and serves each in a task, until asked to stop.
async fn serve(socket: &impl Accept, router: Router, mut stop: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            Some(_) = connections.join_next() => continue,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((room, opening)) => {
                connections.spawn(serve_one(room, opening, router.clone(), stop.clone()));
            }
            Err(error) => {
                // Most often there are too many open files: wait for some to be closed.
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(Duration::from_millis(200)).await;
            }
        }
    }
    let rest = async { while connections.join_next().await.is_some() {} };
    if timeout(GOODBYE_WAIT, rest).await.is_err() {
        tracing::debug!("requests were cut off");
    }
}

/// Serves a connection until its end, or until others need its room.
async fn serve_one<S>(
    room: Room,
    opening: impl Future<Output = io::Result<S>>,
    router: Router,
    stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let served = async |router| match timeout(HEAD_WAIT, opening).await {
        Ok(Ok(stream)) => serve_connection(stream, router, stop).await,
        Ok(Err(error)) => tracing::debug!(%error, "a connection was not opened"),
        Err(_) => tracing::debug!("a connection was not opened in time"),
    };
    match &room {
        Room::Own(_) => served(router).await,
        Room::Shared(seat) => tokio::select! {
            () = seat.end() => tracing::debug!("a connection without a token made way"),
            () = served(router.layer(Extension(seat.clone()))) => {}
        },
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the agent is gone, which has the same effect.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn serve_connection<S>(stream: S, router: Router, mut stop: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT)
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_is_long_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let write = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read_token(&path)
        };
        assert!(write(&format!("{}\n", "a".repeat(32)), 0o600).is_ok());
        let short = write("short", 0o600).unwrap_err();
        assert!(short.message.contains("32 to 512"), "{short}");
        let shared = write(&"a".repeat(32), 0o640).unwrap_err();
        assert!(shared.message.contains("others"), "{shared}");
    }

    #[tokio::test]
    async fn only_a_dead_agents_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/agent.sock");
        let first = UnixSocket::open(&path).await.unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(UnixSocket::open(&path).await.is_err());
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(UnixSocket::open(&path).await.is_ok());
        std::fs::write(&path, "precious").unwrap();
        assert!(UnixSocket::open(&path).await.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
