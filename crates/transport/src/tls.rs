//! Configures TLS 1.3 between hosts: each side proves its key; no resumption, no early data.

use crate::identity::{Identity, host_id_of};
use longhaul_protocol::HostId;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme, version};
use std::sync::{Arc, OnceLock};

/// The ALPN of control connections.
pub(crate) const ALPN_CONTROL: &[u8] = b"longhaul-control/1";
/// The ALPN of bulk connections.
pub(crate) const ALPN_BULK: &[u8] = b"longhaul-bulk/1";
/// The ALPN of connections with rendezvous servers.
pub(crate) const ALPN_RENDEZVOUS: &[u8] = b"longhaul-rendezvous/1";
/// The server name in every handshake; hosts are identified by their keys, not by names.
pub(crate) const SERVER_NAME: &str = "longhaul";

/// Verifies a listener's certificate, and records the identity.
#[derive(Debug)]
pub(crate) struct ExpectedServer {
    /// The only accepted identity; `None` to accept and record any.
    expected: Option<HostId>,
    found: OnceLock<HostId>,
    provider: Arc<CryptoProvider>,
}

impl ExpectedServer {
    pub(crate) fn new(expected: Option<HostId>) -> Arc<Self> {
        Arc::new(Self {
            expected,
            found: OnceLock::new(),
            provider: provider(),
        })
    }

    /// Returns the identity in the certificate (proved only after the handshake).
    pub(crate) fn found(&self) -> Option<HostId> {
        self.found.get().copied()
    }
}

impl ServerCertVerifier for ExpectedServer {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let id = host_id_of(certificate)?;
        let _ = self.found.set(id);
        match self.expected {
            Some(expected) if expected != id => {
                Err(Error::General("another identity than expected".to_owned()))
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Accepts every client that proves some key; whether that key is trusted is checked right after
/// the handshake, so that a refusal can carry a reason.
#[derive(Debug)]
struct AnyClient {
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for AnyClient {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        host_id_of(certificate)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Returns the dialler's TLS configuration.
pub(crate) fn client(
    identity: &Identity,
    expected: Arc<ExpectedServer>,
    alpn: &[u8],
) -> Result<rustls::ClientConfig, Error> {
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(expected)
        .with_client_auth_cert(vec![identity.certificate()], identity.key())?;
    config.alpn_protocols = vec![alpn.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    Ok(config)
}

/// Returns the listener's TLS configuration.
pub(crate) fn server(identity: &Identity, alpns: &[&[u8]]) -> Result<rustls::ServerConfig, Error> {
    let verifier = Arc::new(AnyClient {
        provider: provider(),
    });
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate()], identity.key())?;
    config.alpn_protocols = alpns.iter().map(|alpn| alpn.to_vec()).collect();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(config)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}
