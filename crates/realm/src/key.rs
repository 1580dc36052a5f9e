//! Owns keys and signatures: Ed25519 (RFC 8032), and the fingerprint that names a realm.

use crate::text::hex;
use ring::digest::{SHA256, digest};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Length of the seed of a [`SigningKey`], in bytes.
pub const SEED_BYTES: usize = 32;
/// What precedes an Ed25519 key in a SubjectPublicKeyInfo in DER (RFC 8410).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];

/// Identifies a realm: the SHA-256 digest of its public key as a SubjectPublicKeyInfo in DER.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RealmId(pub [u8; 32]);

/// A public key, 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PublicKey(pub [u8; 32]);

/// A signature, 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signature(pub [[u8; 32]; 2]);

/// A key that signs: that of a realm, or the one-time key of a token.
pub struct SigningKey {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

/// A text that is no realm's id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not the id of a realm (64 hexadecimal digits)")]
pub struct ParseRealmError;

impl SigningKey {
    /// Makes the key of a seed: 32 random bytes, which are the secret.
    ///
    /// Returns `None` only if the library refuses the length of a seed, which is fixed.
    pub fn from_seed(seed: &[u8; SEED_BYTES]) -> Option<Self> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).ok()?;
        let public = pair.public_key().as_ref().try_into().ok()?;
        Some(Self {
            pair,
            public: PublicKey(public),
        })
    }

    /// Returns the public key.
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// Signs bytes for one purpose. A signature for another purpose does not verify.
    pub(crate) fn sign(&self, purpose: &str, bytes: &[u8]) -> Signature {
        let signature = self.pair.sign(&message(purpose, bytes));
        let mut halves = [[0; 32]; 2];
        let (low, high) = signature
            .as_ref()
            .split_at(32.min(signature.as_ref().len()));
        for (half, from) in halves.iter_mut().zip([low, high]) {
            half.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        }
        Signature(halves)
    }
}

/// Never shows the secret.
impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({:?})", self.public)
    }
}

impl PublicKey {
    /// Returns the id of the realm whose key this is.
    pub fn realm(&self) -> RealmId {
        let spki = [&SPKI_PREFIX[..], &self.0].concat();
        RealmId(sha256(&spki))
    }

    /// Returns whether a signature of bytes for one purpose is this key's.
    pub(crate) fn verifies(&self, purpose: &str, bytes: &[u8], signature: &Signature) -> bool {
        UnparsedPublicKey::new(&ED25519, &self.0[..])
            .verify(&message(purpose, bytes), &signature.0.concat())
            .is_ok()
    }
}

/// Returns what is signed: the purpose, a zero byte, and the bytes.
fn message(purpose: &str, bytes: &[u8]) -> Vec<u8> {
    [purpose.as_bytes(), &[0], bytes].concat()
}

/// Returns the SHA-256 digest of bytes.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    let digest = digest(&SHA256, bytes);
    let mut out = [0; 32];
    out.iter_mut()
        .zip(digest.as_ref())
        .for_each(|(to, from)| *to = *from);
    out
}

impl fmt::Display for RealmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for RealmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0[..4]))
    }
}

impl FromStr for RealmId {
    type Err = ParseRealmError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
        if digits.len() != 64 {
            return Err(ParseRealmError);
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(ParseRealmError);
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let value = pair.iter().try_fold(0, |value, byte| {
                digit(*byte).map(|digit| value * 16 + digit)
            })?;
            *byte = u8::try_from(value).map_err(|_| ParseRealmError)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0[..4]))
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0[0][..4]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_seed(&[seed; 32]).unwrap()
    }

    /// RFC 8032, section 7.1, test 1.
    #[test]
    fn keys_are_those_of_ed25519() {
        let seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
        let seed: RealmId = seed.parse().unwrap();
        let key = SigningKey::from_seed(&seed.0).unwrap();
        assert_eq!(
            hex(&key.public().0),
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
        );
    }

    #[test]
    fn a_signature_is_for_one_purpose_of_one_key() {
        let signature = key(1).sign("a", b"text");
        assert!(key(1).public().verifies("a", b"text", &signature));
        assert!(!key(1).public().verifies("b", b"text", &signature));
        assert!(!key(1).public().verifies("a", b"texT", &signature));
        assert!(!key(2).public().verifies("a", b"text", &signature));
        let mut damaged = signature;
        damaged.0[1][7] ^= 1;
        assert!(!key(1).public().verifies("a", b"text", &damaged));
    }

    #[test]
    fn a_realms_id_survives_its_text() {
        let realm = key(3).public().realm();
        assert_eq!(realm.to_string().parse(), Ok(realm));
        for text in ["", "12", &"g".repeat(64), &"+1".repeat(32)] {
            assert_eq!(text.parse::<RealmId>(), Err(ParseRealmError), "{text}");
        }
    }
}
