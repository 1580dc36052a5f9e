//! Derives the keys of a pair of hosts from a secret of their QUIC connection (HKDF, RFC 5869).
//!
//! Secrets of chains and nonces are overwritten when they are dropped. The cryptographic library
//! does not overwrite its own copies of expanded keys.

use super::SealError;
use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf;
use zeroize::Zeroizing;

/// The label under which both hosts export the secret from their QUIC connection (RFC 8446, section
/// 7.5), with an empty context.
pub const EXPORTER_LABEL: &[u8] = b"EXPORTER-longhaul-frame-plane-1";
/// Bytes of the exported secret.
pub const EXPORTED_BYTES: usize = 32;
/// Bytes of the tag behind a sealed payload.
pub const TAG_BYTES: usize = 16;

const SALT: &[u8] = b"longhaul frame plane 1";
const CHAIN_BYTES: usize = 32;
const KEY_BYTES: usize = 32;
const NONCE_BYTES: usize = 12;

/// How payloads are sealed. Both directions of a connection use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    /// AES-256-GCM (NIST SP 800-38D): for processors with instructions for it.
    Aes256Gcm,
    /// ChaCha20-Poly1305 (RFC 8439).
    ChaCha20Poly1305,
}

/// An end of a QUIC connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The end that dialled.
    Dialler,
    /// The end that was dialled.
    Listener,
}

impl Side {
    /// Returns the other end.
    pub fn other(self) -> Self {
        match self {
            Self::Dialler => Self::Listener,
            Self::Listener => Self::Dialler,
        }
    }
}

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

fn expand<const N: usize>(
    secret: &hkdf::Prk,
    info: &[u8],
) -> Result<Zeroizing<[u8; N]>, SealError> {
    let mut output = Zeroizing::new([0; N]);
    secret
        .expand(&[info], Length(N))
        .and_then(|okm| okm.fill(&mut output[..]))
        .map_err(|_| SealError::Derivation)?;
    Ok(output)
}

/// The secret that the keys of one direction's epochs are derived from, one after the other.
pub(super) struct Chain {
    suite: Suite,
    secret: Zeroizing<[u8; CHAIN_BYTES]>,
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chain({:?})", self.suite)
    }
}

impl Chain {
    /// Returns the id of the keys that `sender` seals with, and their chain.
    pub(super) fn new(
        exported: &[u8; EXPORTED_BYTES],
        sender: Side,
        suite: Suite,
    ) -> Result<(u32, Self), SealError> {
        let root = hkdf::Salt::new(hkdf::HKDF_SHA256, SALT).extract(exported);
        let (id, chain): (&[u8], &[u8]) = match sender {
            Side::Dialler => (b"dialler key id", b"dialler chain"),
            Side::Listener => (b"listener key id", b"listener chain"),
        };
        let id = u32::from_le_bytes(*expand(&root, id)?);
        let secret = expand(&root, chain)?;
        Ok((id, Self { suite, secret }))
    }

    /// Returns the keys of the next epoch: the first one at first. The secret is overwritten, so
    /// that these keys cannot be derived again.
    pub(super) fn advance(&mut self) -> Result<EpochKey, SealError> {
        let (algorithm, info): (_, &[u8]) = match self.suite {
            Suite::Aes256Gcm => (&aead::AES_256_GCM, b"key aes-256-gcm"),
            Suite::ChaCha20Poly1305 => (&aead::CHACHA20_POLY1305, b"key chacha20-poly1305"),
        };
        let secret = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &self.secret[..]);
        let key = expand::<KEY_BYTES>(&secret, info)?;
        let key = UnboundKey::new(algorithm, &key[..]).map_err(|_| SealError::Derivation)?;
        let iv = expand(&secret, b"iv")?;
        self.secret = expand(&secret, b"next")?;
        Ok(EpochKey {
            key: LessSafeKey::new(key),
            iv,
        })
    }
}

/// The keys of one epoch of one direction.
pub(super) struct EpochKey {
    key: LessSafeKey,
    iv: Zeroizing<[u8; NONCE_BYTES]>,
}

impl std::fmt::Debug for EpochKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EpochKey")
    }
}

impl EpochKey {
    /// As in TLS 1.3 (RFC 8446, section 5.3).
    #[inline]
    fn nonce(&self, counter: u64) -> Nonce {
        let mut nonce = *self.iv;
        for (byte, counted) in nonce[4..].iter_mut().zip(counter.to_be_bytes()) {
            *byte ^= counted;
        }
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts a payload in place, and returns its tag.
    #[inline]
    pub(super) fn seal(
        &self,
        counter: u64,
        header: &[u8],
        payload: &mut [u8],
    ) -> Result<[u8; TAG_BYTES], SealError> {
        let nonce = self.nonce(counter);
        let sealed = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(header), payload);
        let tag = sealed.map_err(|_| SealError::Length)?;
        tag.as_ref().try_into().map_err(|_| SealError::Length)
    }

    /// Decrypts a payload with its tag in place. Returns the payload's length, or `None` if they
    /// are not authentic.
    #[inline]
    pub(super) fn open(&self, counter: u64, header: &[u8], sealed: &mut [u8]) -> Option<usize> {
        let nonce = self.nonce(counter);
        let opened = self.key.open_in_place(nonce, Aad::from(header), sealed);
        opened.ok().map(|payload| payload.len())
    }
}
