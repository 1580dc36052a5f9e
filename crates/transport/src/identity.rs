//! Owns this host's identity: a key pair generated at the first start, and its certificate.

use crate::files::write_atomic;
use longhaul_protocol::HostId;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ED25519};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::ParsedCertificate;
use std::fmt;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file in the state folder that holds the private key.
pub const KEY_FILE: &str = "identity.pem";
const KEY_FILE_BYTES_MAX: u64 = 16 << 10;

/// Why the identity could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Other users may read the private key.
    #[error("{0} can be read by others; run `chmod 600 {0}`, and make a new identity if it was")]
    Exposed(String),
    /// The file contains no usable key.
    #[error("{}: not an Ed25519 private key: {error}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The error.
        error: String,
    },
}

/// A key pair and the host id that it proves. Cheap to clone.
#[derive(Clone)]
pub struct Identity(Arc<Inner>);

struct Inner {
    id: HostId,
    certificate: CertificateDer<'static>,
    key: PrivatePkcs8KeyDer<'static>,
}

impl Identity {
    /// Loads the identity from `folder`, or creates one at the first start.
    pub fn load_or_create(folder: &Path) -> Result<Self, IdentityError> {
        let path = folder.join(KEY_FILE);
        match read_key(&path)? {
            Some(pem) => {
                let key = KeyPair::from_pem(&pem).map_err(|e| damaged(&path, &e))?;
                if key.algorithm() != &PKCS_ED25519 {
                    return Err(damaged(&path, &"another kind of key"));
                }
                Self::from_key(&key).map_err(|e| damaged(&path, &e))
            }
            None => {
                let key = KeyPair::generate_for(&PKCS_ED25519).map_err(|e| damaged(&path, &e))?;
                let identity = Self::from_key(&key).map_err(|e| damaged(&path, &e))?;
                std::fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(folder)
                    .map_err(|error| file_error(folder, error))?;
                write_atomic(&path, key.serialize_pem().as_bytes())
                    .map_err(|error| file_error(&path, error))?;
                Ok(identity)
            }
        }
    }

    /// Returns the host id: the fingerprint that people compare.
    pub fn host_id(&self) -> HostId {
        self.0.id
    }

    pub(crate) fn certificate(&self) -> CertificateDer<'static> {
        self.0.certificate.clone()
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.0.key.clone_key())
    }

    /// Returns a secret for one purpose, which is stable for the life of the identity.
    pub(crate) fn derived_secret(&self, purpose: &str) -> [u8; 32] {
        blake3::derive_key(purpose, self.0.key.secret_pkcs8_der())
    }

    fn from_key(key: &KeyPair) -> Result<Self, String> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, "longhaul host");
        let certificate = params.self_signed(key).map_err(|e| e.to_string())?;
        let certificate = CertificateDer::from(certificate.der().to_vec());
        Ok(Self(Arc::new(Inner {
            id: host_id_of(&certificate).map_err(|e| e.to_string())?,
            certificate,
            key: PrivatePkcs8KeyDer::from(key.serialize_der()),
        })))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.0.id)
    }
}

/// Returns the host id of a certificate's key.
pub(crate) fn host_id_of(certificate: &CertificateDer<'_>) -> Result<HostId, rustls::Error> {
    let parsed = ParsedCertificate::try_from(certificate)?;
    let spki = parsed.subject_public_key_info();
    Ok(HostId(*blake3::hash(&spki).as_bytes()))
}

fn read_key(path: &Path) -> Result<Option<String>, IdentityError> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(file_error(path, error)),
    };
    if metadata.permissions().mode() & 0o077 != 0 {
        return Err(IdentityError::Exposed(path.display().to_string()));
    }
    if metadata.len() > KEY_FILE_BYTES_MAX {
        return Err(damaged(path, &"too large"));
    }
    std::fs::read_to_string(path)
        .map(Some)
        .map_err(|error| file_error(path, error))
}

fn file_error(path: &Path, error: io::Error) -> IdentityError {
    IdentityError::File {
        path: path.to_owned(),
        error,
    }
}

fn damaged(path: &Path, error: &dyn fmt::Display) -> IdentityError {
    IdentityError::Damaged {
        path: path.to_owned(),
        error: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("state");
        let first = Identity::load_or_create(&folder).unwrap();
        let second = Identity::load_or_create(&folder).unwrap();
        assert_eq!(first.host_id(), second.host_id());
        let mode = std::fs::metadata(folder.join(KEY_FILE)).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);
        let names: Vec<_> = std::fs::read_dir(&folder).unwrap().collect();
        assert_eq!(names.len(), 1, "nothing temporary is left");
    }

    #[test]
    fn identities_differ() {
        let a = tempfile::tempdir().unwrap();
        let b = tempfile::tempdir().unwrap();
        let a = Identity::load_or_create(a.path()).unwrap();
        let b = Identity::load_or_create(b.path()).unwrap();
        assert_ne!(a.host_id(), b.host_id());
    }

    #[test]
    fn the_id_is_the_hash_of_the_public_keys_der() {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(folder.path()).unwrap();
        let certificate = identity.certificate();
        let spki = ParsedCertificate::try_from(&certificate)
            .unwrap()
            .subject_public_key_info();
        // SEQUENCE { SEQUENCE { OID 1.3.101.112 }, BIT STRING of 32 bytes } (RFC 8410).
        assert_eq!(spki.len(), 44);
        assert_eq!(
            &spki[..12],
            [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0]
        );
        assert_eq!(identity.host_id(), HostId(*blake3::hash(&spki).as_bytes()));
    }

    #[test]
    fn a_damaged_or_exposed_key_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(KEY_FILE);
        write_atomic(&path, b"not a key").unwrap();
        let error = Identity::load_or_create(folder.path()).unwrap_err();
        assert!(matches!(error, IdentityError::Damaged { .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"not a key");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = Identity::load_or_create(folder.path()).unwrap_err();
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }
}
