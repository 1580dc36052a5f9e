//! The key of a parcel: its fingerprint, its text, and the keys of cells.

use crate::cell::{BODY_BYTES, NAME_BYTES, Name};
use crate::header::{Bytes16, ParcelId};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::hmac;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use zeroize::Zeroizing;

const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
const FINGERPRINT_INFO: &[u8] = b"longhaul parcel v1 fingerprint";
const CELLS_INFO: &[u8] = b"longhaul parcel v1 cells";
const HEADERS_INFO: &[u8] = b"longhaul parcel v1 headers";
const REPORTS_INFO: &[u8] = b"longhaul parcel v1 reports";

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The system has no random numbers.
    #[error("there are no random numbers: {0}")]
    Random(getrandom::Error),
    /// It is not 64 hexadecimal digits.
    #[error("a key is 64 lowercase hexadecimal digits")]
    Text,
    /// The cryptographic library has refused what it never refuses.
    #[error("the key cannot be used")]
    Refused,
}

/// The name of a key, from which nothing of the key follows.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(Bytes16);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The key that a parcel's cells are encrypted with.
#[derive(Clone)]
pub struct DataKey(Zeroizing<[u8; KEY_BYTES]>);

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(…)")
    }
}

impl DataKey {
    /// Draws a key.
    ///
    /// # Errors
    /// When there are no random numbers.
    pub fn draw() -> Result<Self, KeyError> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        getrandom::fill(&mut *key).map_err(KeyError::Random)?;
        Ok(Self(key))
    }

    /// Creates a key from its bytes.
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// Returns it as a key file has it: 64 hexadecimal digits.
    pub fn text(&self) -> Zeroizing<String> {
        let digits = self.0.iter().map(|byte| format!("{byte:02x}"));
        Zeroizing::new(digits.collect())
    }

    fn derive(&self, salt: &[u8], info: &[&[u8]]) -> Result<Zeroizing<[u8; 32]>, KeyError> {
        let mut derived = Zeroizing::new([0; 32]);
        Salt::new(HKDF_SHA256, salt)
            .extract(&*self.0)
            .expand(info, HKDF_SHA256)
            .and_then(|output| output.fill(&mut *derived))
            .map_err(|_| KeyError::Refused)?;
        debug_assert_eq!(HKDF_SHA256.len(), derived.len());
        Ok(derived)
    }

    /// Returns its fingerprint.
    ///
    /// # Errors
    /// When it cannot be computed.
    pub fn fingerprint(&self) -> Result<Fingerprint, KeyError> {
        let derived = self.derive(&[], &[FINGERPRINT_INFO])?;
        let first = derived.first_chunk().copied().ok_or(KeyError::Refused)?;
        Ok(Fingerprint(Bytes16(first)))
    }

    /// Returns the key that authenticates headers.
    pub(crate) fn of_headers(&self, parcel: &ParcelId) -> Result<hmac::Key, KeyError> {
        self.of_documents(parcel, HEADERS_INFO)
    }

    /// Returns the key that authenticates reports of imports.
    pub(crate) fn of_reports(&self, parcel: &ParcelId) -> Result<hmac::Key, KeyError> {
        self.of_documents(parcel, REPORTS_INFO)
    }

    fn of_documents(&self, parcel: &ParcelId, info: &[u8]) -> Result<hmac::Key, KeyError> {
        let ParcelId(Bytes16(salt)) = parcel;
        let derived = self.derive(salt, &[info])?;
        Ok(hmac::Key::new(hmac::HMAC_SHA256, &*derived))
    }

    /// Returns the key of a device's cells in a generation.
    pub(crate) fn of_cells(
        &self,
        parcel: &ParcelId,
        nonce: &Bytes16,
        device: u16,
    ) -> Result<CellKey, KeyError> {
        let ParcelId(Bytes16(salt)) = parcel;
        let device = device.to_le_bytes();
        let derived = self.derive(salt, &[CELLS_INFO, &nonce.0, &device])?;
        let key = UnboundKey::new(&AES_256_GCM, &*derived).map_err(|_| KeyError::Refused)?;
        Ok(CellKey(LessSafeKey::new(key)))
    }
}

impl FromStr for DataKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let (first, second) = text.split_at_checked(32).ok_or(KeyError::Text)?;
        let parse = |half: &str| half.parse::<Bytes16>().map_err(|_| KeyError::Text);
        let halves = [parse(first)?.0, parse(second)?.0];
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        for (to, from) in key.iter_mut().zip(halves.as_flattened()) {
            *to = *from;
        }
        Ok(Self(key))
    }
}

/// The key of a device's cells in a generation.
pub(crate) struct CellKey(LessSafeKey);

fn nonce(name: &Name) -> Nonce {
    let mut nonce = [0; 12];
    for (to, from) in nonce.iter_mut().zip(name.row.to_le_bytes()) {
        *to = from;
    }
    Nonce::assume_unique_for_key(nonce)
}

impl CellKey {
    /// Encrypts the body of a cell: its plaintext is followed by room for the tag.
    pub(crate) fn seal(&self, name: &Name, body: &mut [u8]) -> Result<(), KeyError> {
        let aad: Aad<[u8; NAME_BYTES]> = Aad::from(name.encode());
        let (plain, tag_place) = body
            .split_at_mut_checked(BODY_BYTES - TAG_BYTES)
            .ok_or(KeyError::Refused)?;
        let sealed = self.0.seal_in_place_separate_tag(nonce(name), aad, plain);
        let tag = sealed.map_err(|_| KeyError::Refused)?;
        tag_place.copy_from_slice(tag.as_ref());
        Ok(())
    }

    /// Decrypts the body of a cell, and returns its plaintext; `None` if it is not authentic.
    pub(crate) fn open<'a>(&self, name: &Name, body: &'a mut [u8]) -> Option<&'a [u8]> {
        let aad = Aad::from(name.encode());
        let plain = self.0.open_in_place(nonce(name), aad, body).ok()?;
        Some(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_its_text() {
        let key = DataKey::draw().unwrap();
        let again: DataKey = key.text().parse().unwrap();
        assert_eq!(again.bytes(), key.bytes());
        assert_eq!(again.fingerprint().unwrap(), key.fingerprint().unwrap());
        let other = DataKey::draw().unwrap();
        assert_ne!(other.fingerprint().unwrap(), key.fingerprint().unwrap());
        for text in ["", "00", &"0".repeat(63), &"G".repeat(64), &"A".repeat(64)] {
            assert!(
                matches!(text.parse::<DataKey>(), Err(KeyError::Text)),
                "{text}"
            );
        }
        assert!(!format!("{key:?}").contains(key.text().as_str()));
    }
}
