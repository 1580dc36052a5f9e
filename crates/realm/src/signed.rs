//! Owns signed documents: bytes that are carried as they were signed, and what verified them.

use crate::key::{PublicKey, RealmId, Signature, SigningKey};
use postcard::{take_from_bytes, to_stdvec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// The format of all documents of this version. It is the first of the signed bytes.
pub const FORMAT: u8 = 1;

/// A kind of document that a realm's key signs.
pub trait Document: Serialize + DeserializeOwned + Clone {
    /// Separates signatures of this kind from all others.
    const PURPOSE: &'static str;
    /// Its name in errors.
    const NAME: &'static str;
    /// Most signed bytes.
    const BYTES_MAX: usize;

    /// Returns the realm that the document names.
    fn realm(&self) -> RealmId;

    /// Checks everything that does not depend on other documents or on the time.
    fn check(&self) -> Result<(), DocumentError>;
}

/// A document as it travels and is stored: not verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Signed<D> {
    /// The realm's public key.
    pub key: PublicKey,
    /// Its signature of [`Self::bytes`].
    pub signature: Signature,
    /// The format (one byte) and the document in postcard's encoding.
    pub bytes: Vec<u8>,
    #[serde(skip)]
    kind: PhantomData<D>,
}

/// A document whose signature, realm and content were checked. Only [`Signed::verify`] and
/// [`sign`] make one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified<D> {
    signed: Signed<D>,
    content: D,
}

/// Why a document is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Another realm's.
    #[error("this {what} is of realm {got}, not of {expected}")]
    OtherRealm {
        /// The kind of document.
        what: &'static str,
        /// The realm of the document's key, or the one that it names.
        got: RealmId,
        /// The expected realm.
        expected: RealmId,
    },
    /// Not signed by the key that it names.
    #[error("the signature of this {what} is wrong: it was changed, or the realm did not sign it")]
    Signature {
        /// The kind of document.
        what: &'static str,
    },
    /// Longer than any may be.
    #[error("a {what} of {bytes} bytes is over the limit of {limit}")]
    TooLong {
        /// The kind of document.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Of a later format.
    #[error("this {what} has format {format}, and this version reads {FORMAT}: update Longhaul")]
    Format {
        /// The kind of document.
        what: &'static str,
        /// Its format.
        format: u8,
    },
    /// Not a document, although correctly signed.
    #[error("this {what} is malformed: {error}")]
    Malformed {
        /// The kind of document.
        what: &'static str,
        /// What is wrong.
        error: String,
    },
    /// Well formed, but it contradicts itself or breaks a limit.
    #[error("{0}")]
    Content(String),
}

/// Signs a document with its realm's key.
///
/// # Errors
///
/// If the document breaks a limit or names another realm than the key's.
pub fn sign<D: Document>(content: &D, key: &SigningKey) -> Result<Verified<D>, DocumentError> {
    let realm = key.public().realm();
    if content.realm() != realm {
        return Err(DocumentError::OtherRealm {
            what: D::NAME,
            got: content.realm(),
            expected: realm,
        });
    }
    content.check()?;
    let mut bytes = vec![FORMAT];
    bytes.extend(to_stdvec(content).map_err(malformed::<D>)?);
    limit::<D>(bytes.len())?;
    let signed = Signed {
        key: key.public(),
        signature: key.sign(D::PURPOSE, &bytes),
        bytes,
        kind: PhantomData,
    };
    Ok(Verified {
        signed,
        content: content.clone(),
    })
}

fn malformed<D: Document>(error: postcard::Error) -> DocumentError {
    DocumentError::Malformed {
        what: D::NAME,
        error: error.to_string(),
    }
}

fn limit<D: Document>(bytes: usize) -> Result<(), DocumentError> {
    if bytes <= D::BYTES_MAX {
        return Ok(());
    }
    Err(DocumentError::TooLong {
        what: D::NAME,
        bytes,
        limit: D::BYTES_MAX,
    })
}

impl<D: Document> Signed<D> {
    /// Verifies the document: length, key, signature, format, content, realm, in this order. The
    /// content is parsed only if the realm signed it.
    pub fn verify(&self, realm: RealmId) -> Result<Verified<D>, DocumentError> {
        let other = |got| DocumentError::OtherRealm {
            what: D::NAME,
            got,
            expected: realm,
        };
        limit::<D>(self.bytes.len())?;
        if self.key.realm() != realm {
            return Err(other(self.key.realm()));
        }
        let (key, bytes) = (&self.key, &self.bytes);
        if !key.verifies(D::PURPOSE, bytes, &self.signature) {
            return Err(DocumentError::Signature { what: D::NAME });
        }
        let (format, rest) = bytes.split_first().unwrap_or((&0, &[]));
        if *format != FORMAT {
            return Err(DocumentError::Format {
                what: D::NAME,
                format: *format,
            });
        }
        let (content, rest) = take_from_bytes::<D>(rest).map_err(malformed::<D>)?;
        if !rest.is_empty() {
            return Err(DocumentError::Malformed {
                what: D::NAME,
                error: format!("{} bytes follow its end", rest.len()),
            });
        }
        if content.realm() != realm {
            return Err(other(content.realm()));
        }
        content.check()?;
        Ok(Verified {
            signed: self.clone(),
            content,
        })
    }
}

impl<D> Verified<D> {
    /// Returns the content.
    pub fn content(&self) -> &D {
        &self.content
    }

    /// Returns the document as it travels.
    pub fn signed(&self) -> &Signed<D> {
        &self.signed
    }
}
