//! The HTTP transport to an S3-compatible service, over TCP or TLS with the system's certificates.

use http_body_util::BodyExt;
use hyper::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector as Tcp};
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::rt::{TokioExecutor, TokioIo};
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest,
    HttpRequestBody, HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientOptions, Result as StoreResult};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsConnector;
use tower_service::Service;

/// Time for a connection, and for a response to begin.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Where distributions keep the certificates of trusted authorities.
const AUTHORITIES: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
];
/// The environment variable that names another file.
const AUTHORITIES_VARIABLE: &str = "SSL_CERT_FILE";

/// A reason why no connections can be made.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The file of certificates cannot be read.
    #[error("cannot read the certificates in {}: {reason}", path.display())]
    Authorities {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The cryptographic settings are inconsistent.
    #[error("TLS cannot be used: {0}")]
    Tls(#[from] rustls::Error),
}

/// A factory of clients.
#[derive(Debug)]
pub(super) struct Connector {
    tls: Arc<ClientConfig>,
}

impl Connector {
    pub(super) fn new() -> Result<Self, SetupError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(authorities()?)
            .with_no_client_auth();
        Ok(Self { tls: Arc::new(tls) })
    }
}

/// Returns the authorities that the system trusts; none if it has no such file: then only services
/// without TLS are usable.
fn authorities() -> Result<RootCertStore, SetupError> {
    let named = std::env::var_os(AUTHORITIES_VARIABLE).map(PathBuf::from);
    let usual = || {
        AUTHORITIES
            .iter()
            .map(PathBuf::from)
            .find(|path| path.exists())
    };
    let mut roots = RootCertStore::empty();
    if let Some(path) = named.or_else(usual) {
        let certificates = read(&path).map_err(|error| SetupError::Authorities {
            reason: error.to_string(),
            path,
        })?;
        // Some trusted ones are too old for this TLS implementation, and unusable.
        roots.add_parsable_certificates(certificates);
    }
    Ok(roots)
}

fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>, rustls::pki_types::pem::Error> {
    CertificateDer::pem_file_iter(path)?.collect()
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> StoreResult<HttpClient> {
        let plain = options.get_config_value(&ClientConfigKey::AllowHttp);
        let mut tcp = Tcp::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let dialler = Dialler {
            tcp,
            tls: self.tls.clone(),
            plain: plain.is_some_and(|plain| plain == "true"),
        };
        let client = Client::builder(TokioExecutor::new()).build(dialler);
        Ok(HttpClient::new(Requests { client }))
    }
}

/// A client that reuses its connections.
#[derive(Debug)]
struct Requests {
    client: Client<Dialler, HttpRequestBody>,
}

// The expansion of the usual macro for such traits.
impl HttpService for Requests {
    fn call<'life, 'future>(
        &'life self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'future>>
    where
        'life: 'future,
        Self: 'future,
    {
        Box::pin(async move {
            let answer = tokio::time::timeout(ANSWER_TIMEOUT, self.client.request(request)).await;
            let late = |late| HttpError::new(HttpErrorKind::Timeout, late);
            let (parts, body) = answer.map_err(late)?.map_err(failed)?.into_parts();
            let body = body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error));
            Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
        })
    }
}

fn failed(error: ClientError) -> HttpError {
    let kind = match error.is_connect() {
        true => HttpErrorKind::Connect,
        false => HttpErrorKind::Request,
    };
    HttpError::new(kind, Described(describe(&error)))
}

/// An error's message with those of its causes.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Described(String);

fn describe(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", describe(source)),
        None => error.to_string(),
    }
}

/// A connector of sockets.
#[derive(Debug, Clone)]
struct Dialler {
    tcp: Tcp,
    tls: Arc<ClientConfig>,
    /// Whether connections without TLS are permitted.
    plain: bool,
}

type Dialled = Pin<Box<dyn Future<Output = io::Result<TokioIo<Stream>>> + Send>>;

impl Service<Uri> for Dialler {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = Dialled;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.tcp.poll_ready(context).map_err(io::Error::other)
    }

    fn call(&mut self, uri: Uri) -> Dialled {
        let tls = uri.scheme_str() == Some("https");
        if !tls && !self.plain {
            let refused = "without TLS it is not used, unless AWS_ALLOW_HTTP=true allows it";
            return Box::pin(async move { Err(io::Error::other(refused)) });
        }
        let connector = TlsConnector::from(self.tls.clone());
        let tcp = self.tcp.call(uri.clone());
        Box::pin(async move {
            let stream = tcp.await;
            let stream = stream.map_err(|error| io::Error::other(describe(&error)))?;
            if !tls {
                return Ok(TokioIo::new(Stream(Box::pin(stream.into_inner()))));
            }
            let host = uri.host().unwrap_or_default();
            let host = host.trim_matches(['[', ']']).to_owned();
            let name = ServerName::try_from(host).map_err(io::Error::other)?;
            let handshake = connector.connect(name, stream.into_inner());
            let stream = tokio::time::timeout(CONNECT_TIMEOUT, handshake).await;
            Ok(TokioIo::new(Stream(Box::pin(stream??))))
        })
    }
}

/// A bidirectional byte stream.
trait Duplex: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Duplex for T {}

/// A connection, with or without TLS.
struct Stream(Pin<Box<dyn Duplex>>);

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.as_mut().poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.as_mut().poll_shutdown(context)
    }
}
