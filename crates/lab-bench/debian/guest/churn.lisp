;;; A heap of orders, of which one after the other is replaced: allocation at full speed under a
;;; collector that copies. Every order must add up to what was noted of it when it was made.

(defparameter *orders-count* 50000)
(defparameter *orders-per-unit* 500)

(defstruct order lines text sum)

(defun text-sum (text)
  (let ((sum 0))
    (declare (type (unsigned-byte 32) sum))
    (loop for char across (the (simple-array character (*)) text)
          do (setf sum (ldb (byte 32 0) (+ (* sum 31) (char-code char)))))
    sum))

(defun order-adds-up-to (order)
  (+ (loop for (item . price) in (order-lines order) sum (* item price))
     (text-sum (order-text order))))

(defun make-random-order ()
  (let* ((lines (loop repeat (+ 4 (random 12)) collect (cons (random 1000) (random 100000))))
         (text (make-array (+ 20 (random 80)) :element-type 'character))
         (order (make-order :lines lines :text text)))
    (loop for i below (length text)
          do (setf (aref text i) (code-char (+ 97 (random 26)))))
    (setf (order-sum order) (order-adds-up-to order))
    order))

(defun check (order)
  (let ((sum (order-adds-up-to order)))
    (unless (= sum (order-sum order))
      (format t "error: an order adds up to ~d, not ~d~%" sum (order-sum order)))))

(let ((stop (car (last sb-ext:*posix-argv*)))
      (orders (make-array *orders-count*)))
  (dotimes (i *orders-count*)
    (setf (aref orders i) (make-random-order)))
  (loop until (probe-file stop)
        do (loop repeat *orders-per-unit*
                 do (let ((i (random *orders-count*)))
                      (check (aref orders i))
                      (setf (aref orders i) (make-random-order))))
           (format t "unit~%")
           (finish-output))
  (map nil #'check orders)
  (finish-output))
